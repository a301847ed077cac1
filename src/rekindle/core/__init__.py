"""The step as data, and everything that can be computed from it: pure Python and numpy, no torch."""
