"""HTTP of an API process: the server, connections, keys, limits, server-sent events."""
