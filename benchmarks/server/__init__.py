"""Start, front end, grammars and hostile bodies of `quire serve`."""
