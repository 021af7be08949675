"""Whom a request is for, by a name that tells nothing secret: `key 1` is who brings the first of
the server's API keys; without keys it is a digest of what clients call their user, or nothing."""

KEY = "key "


def key_name(index: int) -> str:
    """Return what the key at this place among the server's keys is called, everywhere."""
    return f"{KEY}{index + 1}"


def is_key(tenant: str) -> bool:
    return tenant.startswith(KEY)


def key_index(tenant: str) -> int:
    """Return the place of a tenant's key; 0 for all tenants of a server without keys."""
    return int(tenant.removeprefix(KEY)) - 1 if is_key(tenant) else 0
