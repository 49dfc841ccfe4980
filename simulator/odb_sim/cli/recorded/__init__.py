"""Commands on the traces of past runs."""
