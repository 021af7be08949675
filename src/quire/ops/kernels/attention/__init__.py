"""Triton kernels of attention, of layers with states, and of block moves."""
