"""The discrete-event world: ranks, trainers and the exchange, and the measurements of a run."""
