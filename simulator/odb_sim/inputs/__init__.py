"""What a simulation is given: lengths, the workload made of them, costs, and what goes wrong."""
