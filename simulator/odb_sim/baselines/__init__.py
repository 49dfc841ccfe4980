"""Baselines: what other ways of batching would do with the same samples."""
