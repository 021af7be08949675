"""Architectures that read images: a decoder and a vision tower each, one file per family."""
