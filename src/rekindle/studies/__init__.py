"""Runs, sweeps and comparisons of models, for the command line and the experiments."""
