"""Commands on runs that have happened: their traces."""
