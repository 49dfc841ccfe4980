"""What a rank reads: the order of its samples, its sampler, and the state an epoch is saved in."""
