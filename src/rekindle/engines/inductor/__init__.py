"""Replaces a recorded step by one whose small ops are fused and compiled by Inductor.

The stages are `decompose`, `fusion_groups` and `group_compiler`. The result is again a recording:
it is planned, rewritten and run like any other.
"""
