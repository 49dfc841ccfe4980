"""The subcommands of a planner who knows data, model and GPUs, and no budget yet."""
