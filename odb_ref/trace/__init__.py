"""The trace of a job: its format, its files, and the checker that judges it. Spec: R9."""
