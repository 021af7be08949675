"""Interfaces of the engine: the offline `LLM`, `AsyncLLM`, and the HTTP server's processes."""
