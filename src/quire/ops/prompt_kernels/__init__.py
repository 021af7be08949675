"""Attention of prompts by kernels of installed packages, on quire's KV blocks."""
