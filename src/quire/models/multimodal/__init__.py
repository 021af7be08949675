"""Architectures that read images, each with a decoder and a vision tower; one file per family."""
