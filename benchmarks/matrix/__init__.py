"""Public models, small, trained plainly and with Rekindle: the same bits, within every budget."""

BUDGETS = ("none", "halfway", "least")
PLANNER = "mutwo"  # quick: `auto` would take nine tenths of the time
