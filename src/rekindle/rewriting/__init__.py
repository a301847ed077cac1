"""A plan written into the recorded step."""
