"""Core of the scheduler: rows, memory, plans and results. It names no feature."""
