"""From rank to rank: the collectives, and the thread that performs a rank's posts."""
