"""The sample service in a process of its own, the loader process, with the workers of a DataLoader under it."""
