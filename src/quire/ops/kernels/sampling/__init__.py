"""Triton kernels of sampling."""
