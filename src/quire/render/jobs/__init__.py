"""Processes for work that must be bounded in time and memory."""
