"""Models, sweeps and comparisons that the command line and the experiments run."""
