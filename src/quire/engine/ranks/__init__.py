"""Processes that compute one model together, each with a device of its own."""
