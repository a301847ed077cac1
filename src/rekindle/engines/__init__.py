"""The engines that run a rewritten step.

`program` runs it as generated Python code, one operator a line; it is also what all other engines
fall back to. `cudagraph` replays it from CUDA graphs. `inductor` replaces the recorded step, before
it is planned, by one whose small ops are fused and compiled; the result runs on either engine.
`select_engine` chooses by name and device. `expandable_segments` and `gc_pause` set up the process
while a step runs or is captured.
"""
