"""The protocol core: pure, typed, without I/O, clock, threads or randomness.

It answers the Distributed Group Alignment Problem (DGAP): how ranks that form different numbers of batches agree on one
number of steps, round after round.

Read `machine` first. Its docstring explains a round and has the table of phases.
"""
