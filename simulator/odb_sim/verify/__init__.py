"""Judges a target rule: is the protocol with it still what the properties say? See `verdict` for the stages."""
