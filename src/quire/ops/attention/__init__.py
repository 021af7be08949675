"""Attention backends: the interface, its implementations and the choice between them."""
