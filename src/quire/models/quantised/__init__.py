"""Weights that a checkpoint holds quantised: a file for each way of storing them."""
