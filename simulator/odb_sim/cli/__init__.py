"""The subcommands. Each module has ``HELP``, ``DESCRIPTION``, ``add_options`` and ``run_command``: options -> exit status."""
