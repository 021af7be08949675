"""Attention over paged KV memory: one interface, several backends."""
