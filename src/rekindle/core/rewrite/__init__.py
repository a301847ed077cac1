"""Graph-to-graph rewrites that keep every bit."""
