"""Images on a CPU: the time to a first token, and images per second, by several engines."""
