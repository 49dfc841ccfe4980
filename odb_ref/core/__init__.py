"""The DGAP protocol core: pure, typed, without I/O, clock, threads or randomness.

Read `machine` first: the table of phases and how a round goes are at its top.
"""
