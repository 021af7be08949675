"""Starts without torch: an earlier start saves its model, and later starts map it."""
