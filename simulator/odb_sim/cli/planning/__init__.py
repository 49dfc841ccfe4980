"""The subcommands for planning, when data, model and GPUs are known, but not yet the budget."""
