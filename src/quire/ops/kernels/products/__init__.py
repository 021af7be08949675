"""Triton kernels of products."""
