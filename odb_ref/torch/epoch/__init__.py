"""One epoch in the training process: its machine, the consumer's side, and the parts that outlive it."""
