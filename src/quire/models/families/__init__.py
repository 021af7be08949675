"""Architectures: one file per family of models."""
