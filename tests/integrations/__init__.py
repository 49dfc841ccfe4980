"""The integrations with training frameworks, in real processes."""
