"""How a rewritten step runs."""
