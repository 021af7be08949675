"""Model specifications: read from a model's config or GGUF header, and checked."""
