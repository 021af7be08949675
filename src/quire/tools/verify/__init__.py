"""`quire verify`: compares quire's model with the same weights in transformers' class."""
