"""From samples to the steps of a round: pure functions, which the machine calls and a designer may change.

`grouping` divides a window into groups, and `layouts` computes what a group costs. `rules` decides how many steps a round
emits, `alignment` which groups they are, and `order` the order in which they leave. If the ranks share one common order of
samples, `shards` decides which part of it each rank draws.
"""
