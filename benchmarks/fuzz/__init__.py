"""Random training programs, trained plainly and with Rekindle: the same bits, or a refusal."""
