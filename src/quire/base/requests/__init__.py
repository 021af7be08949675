"""Requests and what they return: parameters, media items, outputs and their validation."""
