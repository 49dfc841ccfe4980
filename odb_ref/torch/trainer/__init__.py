"""The side of the trainer: it hands out the steps that are ready, takes part in the exchange, and decides nothing."""
