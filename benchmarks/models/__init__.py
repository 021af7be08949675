"""Formats, other implementations and drafts of models."""
