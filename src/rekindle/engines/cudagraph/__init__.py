"""The engine that replays a step from CUDA graphs.

`graph_parts` splits a step into parts that a graph can capture and those that it cannot.
`graph_engine` runs the first step as generated code, captures the second, and replays it from then
on. `rng_twins` makes recomputed random ops in graphs draw the same numbers as the originals.

The graphs share one memory pool. `allocation_requests` lists the blocks that the captured nodes
will request, with sizes and lifetimes; `core/memory` packs them into one arena and computes their
addresses; `arena` steers the allocator during capture so that they are placed there.
"""
