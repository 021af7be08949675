"""Weights of linear layers: formats, packing and quantisation."""
