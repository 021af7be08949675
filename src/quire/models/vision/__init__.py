"""Vision towers: they turn preprocessed images into embeddings that take the place of tokens."""
