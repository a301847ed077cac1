"""Addresses: layout, packing, and steering of CUDA's allocator."""
