"""Grammars of structured output, from what requests specify."""
