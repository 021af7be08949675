"""Snapshots: a restored scheduler continues unchanged, and a file cannot run code."""

from collections import OrderedDict, deque
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from quire.base.errors import EngineError
from quire.base.messages import Request, RetainedRequest
from quire.base.plan import DraftOrder
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.config import SchedulerConfig
from quire.kv.manager import KVManager
from quire.kv.pool import BlockPool
from quire.scheduler import snapshot
from quire.scheduler.beams import Beam
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.names import Digester
from quire.scheduler.core.queue import Fifo
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.snapshot import (
    CLASS,
    INSTANCE,
    LEAF,
    OMITTED,
    REF,
    decode,
    dump,
    encode,
    restore,
)
from quire.spec.cache_group import CacheGroup
from tests.scheduler.test_scheduler_machine import (
    FULL,
    HybridStoresMachine,
    MixedMachine,
    MixedStoresMachine,
    SchedulerMachine,
)
from tests.support.cases import slow_but
from tests.support.scheduler.fake_device import make_request
from tests.support.scheduler.state_machines import FEW, run_machine


def written(value: object, **options: Any) -> Any:
    """Return a value as it is restored from a file."""
    data = msgspec.msgpack.encode(
        dump(value, **options), enc_hook=lambda deferred: encode(deferred.value)
    )
    return restore(msgspec.msgpack.decode(data))


def holder(**attributes: object) -> BlockPool:
    """Return an instance that may be saved, with these attributes."""
    pool = BlockPool(1)
    vars(pool).update(attributes)
    return pool


def test_identity_and_cycles_are_kept() -> None:
    shared, array = [1, 2], np.arange(3)
    pool = holder(first=shared, second=shared, rows=array, same=array, line=deque([shared], 5))
    vars(pool)["self"] = (pool, {"me": pool})
    copy = written(pool)
    assert copy.first is copy.second is copy.line[0] and copy.first == shared
    assert copy.line.maxlen == 5
    assert copy.rows is copy.same and copy.rows.tolist() == [0, 1, 2]
    copy.rows[0] = 7  # it can be written
    assert copy.self[0] is copy is copy.self[1]["me"]


def test_values_are_restored_unchanged() -> None:
    request = Request("r", [1, 2, 3], SamplingParams(stop=["x"], logit_bias={3: 1.5}), seed=-5)
    objects = np.full((2, 2), None, object)
    objects[0, 1] = request
    values = {
        "numbers": [True, 1, -(1 << 63), (1 << 64) - 1, 0.5, float("inf")],
        "texts": ["a", "\u20ac", b"\x00\xff", None],
        "nested": ({1, 2}, frozenset({"a"}), OrderedDict([(2, "b"), (1, "a")]), ((), [])),
        "arrays": [np.zeros((3, 100), np.int32), np.array([[1, 0] * 50 + [0]]), np.array([], bool)],
        "scalar": np.int64(1 << 62),
        "objects": objects,
        "frozen": Beam(1, 2, np.float32(0.25)),
        "request": request,
        "keyed": {(1, 2): [3], b"d": 4, "e": request},
    }
    copy = written(holder(**values))
    for name, value in values.items():
        got = getattr(copy, name)
        assert type(got) is type(value), name
        if name == "arrays":
            for mine, theirs in zip(got, value, strict=True):
                assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
                assert (mine == theirs).all()
        elif name == "objects":
            assert got.shape == (2, 2) and got[0, 1] == request and got[1, 1] is None
        else:
            assert got == value, name
    assert copy.objects[0, 1] is copy.request
    assert list(copy.nested[2]) == [2, 1]


def test_omitted_attributes_are_not_saved_and_can_be_set_afterwards() -> None:
    kv = KVManager((FULL,), (20,), 4)
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8)
    scheduler = Scheduler(Memory(kv, 8), config, 40)
    copy = written(scheduler, omit=OMITTED)
    assert "digester" not in vars(copy.memory.names) and "events" not in vars(copy.lifecycle)
    copy.continue_with(digester := Digester())
    assert copy.memory.names.digester is digester
    assert copy.add(make_request("r", [1, 2, 3], max_tokens=2), 0.0).events
    assert written(holder(make=Fifo)).make is Fifo


def test_an_error_names_the_attribute_that_cannot_be_saved() -> None:
    for value in (lambda: None, print, object(), open):
        with pytest.raises(EngineError, match=r"cannot be saved"):
            dump(holder(thing=value))
    with pytest.raises(EngineError, match="'thing'"):
        dump(holder(thing=[lambda: None]))


@pytest.mark.parametrize(
    "entry",
    [
        [INSTANCE, "os:system", {}],
        [INSTANCE, "system", {}],
        [INSTANCE, "CoreServer", {}],
        [INSTANCE, "BlockPool", {"__class__": 1}],
        [INSTANCE, "BlockPool.allocate", {}],
        [INSTANCE, "BlockPool", {"x": [CLASS, "builtins:eval"]}],
        [INSTANCE, "BlockPool", {"x": [CLASS, "eval"]}],
        [INSTANCE, "BlockPool", {"x": [LEAF, "BlockPool", {"num_blocks": 1}]}],
        [INSTANCE, "BlockPool", {"x": [REF, 9]}],
        [INSTANCE, "BlockPool", {"x": [99]}],
        [4, "|O", [1], b"12345678"],
        [5, "<i4", [1 << 40]],
        [4, "<i4", [3], b"1"],
        [],
        [INSTANCE],
    ],
)
def test_damaged_and_hostile_data_is_refused(entry: object) -> None:
    with pytest.raises(EngineError):
        restore({"root": [REF, 0], "heap": [entry]})
    for data in (None, [], {"root": [REF, 0]}, {"heap": []}):
        with pytest.raises(EngineError):
            restore(data)


def test_a_single_value_can_be_encoded_and_decoded() -> None:
    group = CacheGroup("window", (0, 1), 2, 8, window=5)
    assert decode(msgspec.msgpack.decode(msgspec.msgpack.encode(encode(group)))) == group
    with pytest.raises(EngineError, match="cannot be saved"):
        encode(object())


def test_items_of_earlier_recordings_get_their_current_names() -> None:
    def earlier(data: Any, kind: str, fields: dict[str, str]) -> Any:
        [tag, _, content] = data
        return [
            tag,
            f"quire.base.messages:{kind}",
            {fields.get(k, k): v for k, v in content.items()},
        ]

    order = DraftOrder(*(np.arange(2, dtype=np.int32) + n for n in range(7)))
    retained = RetainedRequest("a", 1, 2, 3, 4, 5.0, tenant="t", cache_salt="")
    old = earlier(encode(order), "DraftOrder", {"num_draft_tokens": "num_guesses"})
    found = decode(snapshot.with_current_names([snapshot.LIST, old])[1])
    np.testing.assert_array_equal(found.num_draft_tokens, order.num_draft_tokens)
    old = {"put": earlier(encode(retained), "HeldRequest", {})}
    assert decode(snapshot.with_current_names(old)["put"]) == retained


class Restored:
    """At random points, the scheduler is replaced by its restored snapshot."""

    @rule(times=st.integers(1, 2))
    def replace(self, times: int) -> None:
        for _ in range(times):
            self.scheduler = written(self.scheduler, omit=OMITTED)
            self.scheduler.continue_with(Digester())
        self.kv, self.stores.scheduler = self.scheduler.memory.kv, self.scheduler
        self.core.scheduler = self.core.doors = self.scheduler
        in_flight = self.scheduler.planner.in_flight  # whose masks are made of their sequences
        for submitted, step in zip(self.core.in_flight, in_flight, strict=True):
            submitted.sampling = step.sequences


class RestoredMachine(Restored, SchedulerMachine):
    pass


class RestoredMixedMachine(Restored, MixedMachine):
    pass


class RestoredStoresMachine(Restored, MixedStoresMachine):
    pass


class RestoredHybridMachine(Restored, HybridStoresMachine):
    pass


@FEW
@pytest.mark.parametrize(
    "machine",
    slow_but(
        (RestoredMachine, RestoredMixedMachine, RestoredStoresMachine, RestoredHybridMachine),
        RestoredMixedMachine,
        RestoredStoresMachine,
        RestoredHybridMachine,
    ),
)
def test_a_restored_scheduler_continues_random_programs(machine: type, max_examples: int) -> None:
    run_machine(machine, max_examples)


def test_a_foreign_class_with_the_name_of_one_of_ours_cannot_be_saved() -> None:
    """For example a plug-in's policy: it is refused at once, before anything is written."""
    with pytest.raises(EngineError, match="cannot be saved"):
        dump([type("Queued", (), {})()])


@pytest.mark.parametrize("shape", [(200,), (20, 30), (5, 6, 7)])
@pytest.mark.parametrize("is_narrow", [True, False])
def test_arrays_of_all_shapes_are_restored_unchanged(
    shape: tuple[int, ...], is_narrow: bool
) -> None:
    """A table is stored without the zeros at the end of its rows."""
    array = np.random.default_rng(1).integers(1, 99, shape, np.int32)
    if is_narrow:
        array[..., 2:] = 0
    encoded = snapshot._array(array)
    assert (encoded[0] == snapshot.NARROW) == (is_narrow and len(shape) == 2)
    tag, *rest = encoded
    found = snapshot._plain(tag, rest)
    assert found.dtype == array.dtype and np.array_equal(found, array)
