"""The step as data, its analysis, simulation and rewrites: pure Python and numpy, no torch."""
