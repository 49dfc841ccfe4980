"""The two sides of a loader, reading and training: their messages, the driver, the backends, the session."""
