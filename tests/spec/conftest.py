"""Hypothesis without deadlines: how long an example takes says how busy the machine is."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("odb", deadline=None)
settings.load_profile("odb")
