"""The conversation of `quire chat` and `quire run`."""
