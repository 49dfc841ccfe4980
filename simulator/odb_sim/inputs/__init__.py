"""The inputs of a simulation: lengths, the workload made of them, costs, and faults."""
