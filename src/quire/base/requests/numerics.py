"""Fingerprint of an engine's numerics: a short text that says whether two engines' bits are equal.

    q1-SOFTWARE-DEVICE-MODEL-FORMATS-WEIGHTS    each a part's digest, in hexadecimal digits

Engines with equal fingerprints give the same tokens and log-probabilities to the same prompt tokens
with the same sampling parameters. If two fingerprints differ, their parts show where.
"""

import hashlib
from collections.abc import Mapping

VERSION = "q1"
# Name -> hexadecimal digits of its digest. Weights change most often, and have the longest one.
PARTS: Mapping[str, int] = {"software": 8, "device": 8, "model": 8, "formats": 8, "weights": 16}


def fingerprint(parts: Mapping[str, str]) -> str | None:
    """Return the fingerprint of numerics, given each part as text. None without parts."""
    if not parts:
        return None
    return "-".join([VERSION, *(_digest(parts[name], size) for name, size in PARTS.items())])


def differing_parts(one: str, other: str) -> list[str]:
    """Return the names of the parts in which two fingerprints differ. Raises ValueError for a text
    that is not a fingerprint of this version."""
    pairs = zip(_split(one), _split(other), strict=True)
    return [name for name, (mine, theirs) in zip(PARTS, pairs, strict=True) if mine != theirs]


def differs(name: str, rest: str) -> str:
    """Return the sentence that a part, such as the weights, differs. rest: from what."""
    verb = "differ" if name.endswith("s") else "differs"
    return f"the {name} {verb} {rest}"


def _split(text: str) -> list[str]:
    version, *found = text[:128].split("-")
    if version != VERSION or [len(each) for each in found] != list(PARTS.values()):
        raise ValueError(f"{text[:128]!r} is no fingerprint of numerics; it begins with {VERSION}-")
    return found


def _digest(text: str, size: int) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:size]
