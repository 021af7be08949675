"""Ways in: the offline `LLM`, later the HTTP server."""
