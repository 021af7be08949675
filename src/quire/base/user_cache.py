"""Where the user's caches lie."""

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """Return the directory of one of quire's caches; it need not exist."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "quire" / name
