"""From samples to the steps of a round: pure functions of values, which the machine calls and a designer changes.

`grouping` makes groups of a window and `layouts` says what a group costs; `rules` says how many steps a round emits, and
`alignment` which groups those are; `order` in which order they leave. `shards` says what of a common order each rank draws,
where they share one.
"""
