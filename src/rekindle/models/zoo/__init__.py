"""Models built from configurations."""
