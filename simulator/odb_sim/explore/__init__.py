"""Explores every interleaving of the real protocol core, for small worlds.

`rank` is one rank with its own books, source, queue and consumer. `driver` drives its core. `world` couples the ranks by the
exchange, and by trainers with a collective in every step. `checks` states what must hold, and `search` walks all states.
"""
