"""Grammars: compiled, advanced token by token, and turned into masks."""
