"""Questions over many runs: comparisons, sweeps, tuning, scale."""
