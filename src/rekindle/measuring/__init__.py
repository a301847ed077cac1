"""Times and bytes of real runs."""
