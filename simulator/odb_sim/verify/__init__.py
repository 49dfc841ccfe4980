"""Verifies a target rule: whether the protocol with it still has all properties. See `verdict` for the stages."""
