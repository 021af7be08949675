"""GGUF files: their header, and the model specification that it holds."""
