"""Stored responses: a limit of bytes, separate owners, whole conversations."""

from random import Random
from typing import Any

from quire.serve.responses.store import ResponseStore, Stored, new_id, process_of


def stored(number: int, previous: str | None = None, size: int = 100) -> Stored:
    response: dict[str, Any] = {"previous_response_id": previous, "output": [{"id": f"m{number}"}]}
    return Stored.of(response, [{"text": "x" * size}])


def test_least_recently_used_response_is_evicted() -> None:
    store = ResponseStore(3 * stored(0).num_bytes)
    for number in range(3):
        store.put("", f"r{number}", stored(number))
    assert store.get("", "r0") is not None
    store.put("", "r3", stored(3))
    assert [n for n in range(4) if store.get("", f"r{n}")] == [0, 2, 3]
    assert store.with_item("", "m1") is None
    assert store.with_item("", "m3") == stored(3)


def test_response_larger_than_the_store_is_not_stored() -> None:
    store = ResponseStore(stored(0).num_bytes)
    store.put("", "r0", stored(0))
    store.put("", "r1", stored(1, size=101))
    assert store.get("", "r0") is not None and store.get("", "r1") is None


def test_owner_with_the_most_bytes_loses_responses_first() -> None:
    store = ResponseStore(4 * stored(0).num_bytes)
    store.put("little", "r", stored(0))
    for number in range(1, 9):
        store.put("much", f"r{number}", stored(number))
    assert store.get("little", "r") is not None
    assert store.get("much", "r") is None and store.get("little", "r8") is None


def test_reading_a_conversation_protects_its_beginning() -> None:
    """Reading it uses the oldest response last, so that one is evicted last."""
    store = ResponseStore(4 * stored(0, "r9").num_bytes)
    store.put("", "r0", stored(0))
    store.put("", "r1", stored(1, "r0"))
    store.put("", "x", stored(2))
    assert store.conversation("", "r1") == [stored(0), stored(1, "r0")]
    store.put("", "y", stored(3))
    store.put("", "z", stored(4))
    assert store.get("", "x") is None
    assert store.conversation("", "r1") == [stored(0), stored(1, "r0")]
    store.remove("", "r0")
    assert store.conversation("", "r1") == "r0"


def test_byte_count_matches_the_stored_responses() -> None:
    random, store = Random(5), ResponseStore(20_000)
    for number in range(500):
        owner = random.choice("abc")
        if random.random() < 0.3:
            store.remove(owner, f"r{random.randrange(number + 1)}")
        else:
            store.put(owner, f"r{number}", stored(number, size=random.randrange(3000)))
        names = [(each, f"r{n}") for each in "abc" for n in range(number + 1)]
        remaining = [found for name in names if (found := store.get(*name)) is not None]
        assert store.num_bytes == sum(each.num_bytes for each in remaining) <= 20_000


def test_id_contains_the_number_of_its_process() -> None:
    made = new_id("resp", 3)
    assert made.startswith("resp_") and process_of(made) == 3
    assert new_id("resp", 3) != made
    for other in ("resp_1", "", "resp_" + "x" * 36, "chatcmpl-" + "0" * 32):
        assert process_of(other) is None
