"""What runs in the Python of an environment of its own, since its packages want other versions than ours."""
