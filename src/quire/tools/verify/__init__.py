"""`quire verify`: a model here beside the same weights in transformers' class."""
