"""Communication between ranks: the collectives, and the thread that carries out a rank's posts."""
