"""Architectures of the Qwen families."""
