"""Scripts that run in separate environments, because their packages need other versions than ours."""
