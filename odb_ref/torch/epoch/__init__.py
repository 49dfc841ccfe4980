"""One epoch in the training process: its machine, what the consumer takes, and what outlives it."""
