"""The documents: their code blocks."""
