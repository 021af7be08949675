"""Requests and their results: parameters, media items, outputs and validation."""
