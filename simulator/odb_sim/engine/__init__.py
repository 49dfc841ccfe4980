"""The discrete-event world: ranks, trainers and the exchange, and what is measured of them."""
