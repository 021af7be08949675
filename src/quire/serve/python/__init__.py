"""The Python interfaces: `LLM`, `AsyncLLM` and sessions."""
