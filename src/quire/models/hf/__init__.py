"""Models implemented by the transformers package, with quire's layers and paged attention."""
