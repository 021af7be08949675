"""Observers of an API process: usage, rate limits and traces."""
