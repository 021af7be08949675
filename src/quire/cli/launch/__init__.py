"""`quire launch`: coding agents of other projects, set up to use a server of quire."""
