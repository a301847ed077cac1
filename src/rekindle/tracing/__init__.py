"""Traces a training step on fake tensors, and lifts the recording to a torch-free graph."""
