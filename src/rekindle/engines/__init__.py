"""The engines that run a rewritten step: as generated code (`program`) or from CUDA graphs.

`inductor` replaces the recorded step, before it is planned, by one with fused and compiled ops.
"""
