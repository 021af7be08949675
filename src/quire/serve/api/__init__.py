"""The OpenAI-compatible HTTP server: FastAPI over a client of the core. Never imports torch."""
