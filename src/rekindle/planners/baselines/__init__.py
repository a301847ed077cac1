"""Planners from the literature, to compare with."""
