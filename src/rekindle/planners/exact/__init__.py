"""Integer programs: the optimum of small graphs."""
