"""Rewrites a recorded step.

`step_forms` gives the forms of a step's graph that a plan may be made for, with help of
`multi_tensor` for small ops. `apply_schedule` writes a plan's schedule into an FX graph, the
`RewrittenStep`, with recomputed calls and frees. `verify` proves it right by symbolic execution
before it runs.
"""
