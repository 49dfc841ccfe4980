"""Recorded runs: read, simulated again, and fitted to cost models."""
