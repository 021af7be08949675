"""Endpoints of quire's own: sessions, prefixes, streams, the page and the operator's."""
