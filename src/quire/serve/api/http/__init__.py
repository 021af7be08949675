"""HTTP of an API process: connections, limits, keys, server-sent events."""
