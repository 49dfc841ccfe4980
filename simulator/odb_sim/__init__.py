"""Discrete-event simulation and exhaustive exploration of the protocol core, and the ``odb-ref`` command line."""
