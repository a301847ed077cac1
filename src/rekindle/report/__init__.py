"""Reports on a step: terminal, page, figures and JSON. Without torch."""
