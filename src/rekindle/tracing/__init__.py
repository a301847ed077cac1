"""The only layer that touches torch: captures a step, lifts it to the IR, and runs it."""
