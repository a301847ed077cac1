"""Rewrites a recorded step for a plan, and proves the result right before it runs."""
