"""Memory of KV blocks on devices and the host, and moves between the two."""
