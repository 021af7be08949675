"""Bodies of requests: what clients may send, and what it becomes."""
