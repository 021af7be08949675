"""Fingerprint of an engine's numerics: a short text that says whether two engines' bits are equal.

    q2-SOFTWARE-DEVICE-MODEL-FORMATS-WEIGHTS-TEXT    each a part's digest, in hexadecimal digits

Engines with equal fingerprints give the same answers to the same requests. If two fingerprints
differ, their parts show where. The last part is about the text: how a request becomes prompt tokens
and sampling parameters.
"""

import hashlib
from collections.abc import Mapping

VERSION = "q2"
# Name -> hexadecimal digits of its digest. Weights change most often, and have the longest one.
PARTS: Mapping[str, int] = {
    "software": 8, "device": 8, "model": 8, "formats": 8, "weights": 16, "text": 8
}  # fmt: skip


def fingerprint(parts: Mapping[str, str]) -> str | None:
    """Return the fingerprint of numerics, given each part as text. None without parts."""
    if not parts:
        return None
    return "-".join([VERSION, *(_digest(parts[name], size) for name, size in PARTS.items())])


def with_adapter(parts: Mapping[str, str], adapter_id: str) -> Mapping[str, str]:
    """Return the numerics of a request's answer: an adapter counts among the weights. adapter_id:
    digest of the adapter's files; empty without an adapter."""
    if not parts or not adapter_id:
        return parts
    return {**parts, "weights": f"{parts['weights']}, adapter {adapter_id}"}


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
