"""Ways in: the offline `LLM`, `AsyncLLM`, and the processes of the HTTP server."""
