"""The scheduler itself: rows, memory, plans and results. It names no feature."""
