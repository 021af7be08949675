"""Fingerprints of numerics: equal for equal parts, and they show which part differs."""

import pytest

from quire.base.requests.numerics import PARTS, differing_parts, fingerprint, with_adapter

ONE = {name: f"{name} of one engine" for name in PARTS}


def test_equal_parts_have_equal_fingerprints() -> None:
    found = fingerprint(ONE)
    assert found is not None and found == fingerprint(dict(reversed(ONE.items())))
    assert found.startswith("q2-") and len(found) <= 64 and differing_parts(found, found) == []
    assert fingerprint({}) is None


@pytest.mark.parametrize("name", PARTS)
def test_each_part_changes_its_own_digest(name: str) -> None:
    other = ONE | {name: "something else"}
    assert differing_parts(str(fingerprint(ONE)), str(fingerprint(other))) == [name]


def test_adapter_changes_the_digest_of_the_weights() -> None:
    name = str(fingerprint(ONE))
    assert fingerprint(with_adapter(ONE, "")) == name and with_adapter({}, "a1") == {}
    one, other = (str(fingerprint(with_adapter(ONE, digest))) for digest in ("a1", "b2"))
    assert differing_parts(name, one) == differing_parts(one, other) == ["weights"]


@pytest.mark.parametrize("text", ["", "q2", "q1-" + "0" * 50, "fp_44709d6fcb", "q2-1-2-3-4-5-6"])
def test_malformed_fingerprints_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="no fingerprint of numerics"):
        differing_parts(text, str(fingerprint(ONE)))
