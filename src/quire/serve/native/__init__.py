"""quire's own endpoints: sessions, prefixes, streams, the web page and administration."""
