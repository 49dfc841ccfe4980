"""Speed, memory and behaviour beside the released peer: ``python -m tests.bench``."""
