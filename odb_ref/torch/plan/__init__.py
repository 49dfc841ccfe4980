"""Plans what a rank reads: the order of its samples, its sampler, and the state in which an epoch is saved."""
