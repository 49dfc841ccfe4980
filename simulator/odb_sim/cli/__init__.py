"""The subcommands. Each module has ``add_parser(subparsers)``, which sets ``run``: options -> exit status."""
