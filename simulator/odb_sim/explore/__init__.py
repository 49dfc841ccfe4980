"""Every interleaving of the real protocol core, for small worlds.

`rank` is one rank with all that is its own (books, source, queue, consumer), `driver` drives its core, `world` couples the
ranks (exchange, trainers with a collective in every step), `checks` says what must hold, `search` walks through all of it.
"""
