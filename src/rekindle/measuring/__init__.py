"""Measures what ops and steps take: time and memory, on CUDA and on the CPU."""
