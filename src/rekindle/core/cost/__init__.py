"""Costs of ops, measured or analytic, and their growth with the batch."""
