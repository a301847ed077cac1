"""What ops cost, measured or analytic, and at which batch sizes."""
