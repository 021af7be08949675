"""Fingerprints of numerics: equal for equal parts, and they show which part differs."""

import pytest

from quire.base.requests.numerics import PARTS, differing_parts, fingerprint

ONE = {name: f"{name} of one engine" for name in PARTS}


def test_equal_parts_have_equal_fingerprints() -> None:
    found = fingerprint(ONE)
    assert found is not None and found == fingerprint(dict(reversed(ONE.items())))
    assert found.startswith("q1-") and len(found) <= 64 and differing_parts(found, found) == []
    assert fingerprint({}) is None


@pytest.mark.parametrize("name", PARTS)
def test_each_part_changes_its_own_digest(name: str) -> None:
    other = ONE | {name: "something else"}
    assert differing_parts(str(fingerprint(ONE)), str(fingerprint(other))) == [name]


@pytest.mark.parametrize("text", ["", "q1", "q2-" + "0" * 50, "fp_44709d6fcb", "q1-1-2-3-4-5"])
def test_other_fingerprints_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no fingerprint of numerics"):
        differing_parts(text, str(fingerprint(ONE)))
