"""Rules of the core for the windows of many ranks at once, as arrays: what a simulation of thousands of ranks is made of."""
