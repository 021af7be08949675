"""Vision towers, which turn preprocessed images into embeddings of placeholder tokens."""
