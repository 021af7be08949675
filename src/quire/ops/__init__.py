"""Operations, one per file, each with its torch reference, its kernels and its dispatch."""
