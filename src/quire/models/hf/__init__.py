"""Models that the transformers package implements, with quire's layers and paged attention."""
