"""Names of tenants, which reveal no secret.

With API keys, `key 1` is the holder of the server's first key. Without keys, the name is a digest
of the user that the client names, or empty.
"""

KEY = "key "


def key_name(index: int) -> str:
    """Return the tenant's name for the key with this index."""
    return f"{KEY}{index + 1}"


def is_key(tenant: str) -> bool:
    return tenant.startswith(KEY)


def key_index(tenant: str) -> int:
    """Return the index of a tenant's key; 0 for all tenants of a server without keys."""
    return int(tenant.removeprefix(KEY)) - 1 if is_key(tenant) else 0
