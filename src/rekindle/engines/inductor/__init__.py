"""Replaces a recorded step by one whose small ops are fused and compiled by Inductor.

`decompose` rewrites the recording into small functional calls (`decompositions` has those without
an operator), on a GPU with the layouts that its kernels want (`gpu_layouts`). `rewriter` is what
these passes share; it adds calls through `recording_builder`, which writes a new recording on fake
tensors. `fusion_groups` then merges calls into groups: `call_index` knows which are fusible,
`always_recompute` what the backward pass recomputes rather than reads. `group_compiler` compiles
each kind of group once.

The result is again a recording: it is planned, rewritten and run like any other.
"""
