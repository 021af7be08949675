"""Grammars: compiled, followed token by token, and turned into masks."""
