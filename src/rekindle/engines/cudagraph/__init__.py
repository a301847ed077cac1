"""The engine that replays a step from CUDA graphs, with all allocations in one arena."""
