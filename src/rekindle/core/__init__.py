"""The step as data, and all that can be computed from it: pure Python and numpy, no torch."""
