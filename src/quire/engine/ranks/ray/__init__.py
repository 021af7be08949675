"""Ranks that Ray starts."""
