"""The zoo: models with random weights and random data."""
