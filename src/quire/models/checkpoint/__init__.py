"""Checkpoints: their files and formats, and which tensors fill a parameter of a rank."""
