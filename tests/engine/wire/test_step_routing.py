"""A step's results as messages over connections: each token reaches its client with its request id.

Covers `base/step_outputs.py`.
"""

import numpy as np

from quire.base.step_outputs import Finish, RowName, SequenceUpdate, StepOutputs
from quire.engine.client.output import StepReader
from quire.engine.wire.core_server import StepRouter
from quire.engine.wire.wire import LENGTH, client_codec, core_codec
from tests.support.engine.updates import read


def tokens(*lines: tuple[int, int]) -> StepOutputs:
    """lines: row, token."""
    columns = np.array(lines, np.int32).reshape(-1, 2)
    return StepOutputs(columns[:, 0], columns[:, 1])


def named(names: list[RowName], *lines: tuple[int, int]) -> StepOutputs:
    plain = tokens(*lines)
    return StepOutputs(plain.rows, plain.token_ids, names)


class _Wire:
    """A router, and a reader for each client after the real encoding."""

    def __init__(self, owners: dict[str, int]) -> None:
        self.owners = owners
        self.router = StepRouter(8, owners.get)
        self.readers: dict[int, StepReader] = {}
        self.sent: dict[int, StepOutputs] = {}

    def route(self, outputs: StepOutputs) -> dict[int, list[tuple[str, int, list[int], int]]]:
        self.sent = self.router.split(outputs)
        found = {}
        for client, message in self.sent.items():
            body = core_codec().encode(message)[LENGTH.size :]
            received = client_codec().decode(body)
            assert isinstance(received, StepOutputs)
            reader = self.readers.setdefault(client, StepReader())
            found[client] = [
                (o.request_id, o.index, o.token_ids, o.num_cached_tokens)
                for o in read(reader, received)
            ]
        return found


def test_row_names_are_sent_once() -> None:
    wire = _Wire({"a": 3, "b": 3})
    first, second = RowName(0, "a", 1, 16), RowName(5, "b", 0, 0)
    outputs = named([first, second], (0, 7), (5, 2**31 - 1))
    assert wire.route(outputs) == {3: [("a", 1, [7], 16), ("b", 0, [2**31 - 1], 0)]}
    assert wire.sent[3].names == [first, second]
    assert wire.route(tokens((5, 1))) == {3: [("b", 0, [1], 0)]}
    assert wire.sent[3].names == []


def test_reused_row_gets_a_new_name() -> None:
    """The new sequence may have the same request id, or another client."""
    wire = _Wire({"a": 0, "b": 0, "c": 1})
    wire.route(named([RowName(2, "a", 0, 32)], (2, 7)))
    assert wire.route(named([RowName(2, "b", 0, 0)], (2, 8))) == {0: [("b", 0, [8], 0)]}
    assert wire.route(named([RowName(2, "b", 0, 48)], (2, 9))) == {0: [("b", 0, [9], 48)]}
    assert wire.route(named([RowName(2, "c", 0, 0)], (2, 5))) == {1: [("c", 0, [5], 0)]}


def test_each_client_gets_only_its_own_tokens() -> None:
    wire = _Wire({"a": 0, "b": 1, "c": 0})
    names = [RowName(i, name, 0, 0) for i, name in enumerate("abcd")]
    lines = [(i, 10 + i) for i in range(4)]
    other = SequenceUpdate("b", token_ids=[5], finish=Finish("stop"))
    expected = {
        0: [("a", 0, [10], 0), ("c", 0, [12], 0)],
        1: [("b", 0, [11], 0), ("b", 0, [5], 0)],
    }
    for new_names in (names, []):  # the fourth row has no client
        plain = tokens(*lines)
        outputs = StepOutputs(plain.rows, plain.token_ids, new_names, [other])
        assert wire.route(outputs) == expected
    assert wire.sent[0].names == wire.sent[1].names == []


def test_updates_without_token_columns_are_routed() -> None:
    wire = _Wire({"a": 4})
    updates = [SequenceUpdate("a", finish=Finish("length")), SequenceUpdate("gone", token_ids=[1])]
    outputs = StepOutputs(details=updates)
    assert wire.route(outputs) == {4: [("a", 0, [], 0)]}
    assert not StepOutputs() and not tokens() and outputs
    assert wire.route(StepOutputs()) == {}


def test_outputs_of_a_single_client_are_not_copied() -> None:
    """This is the common case in steady decoding."""
    wire = _Wire({"a": 0, "b": 0})
    wire.route(named([RowName(0, "a", 0, 0), RowName(1, "b", 0, 0)]))
    outputs = tokens((0, 1), (1, 2))
    assert wire.router.split(outputs) == {0: outputs}
    assert wire.router.split(outputs)[0] is outputs


def test_token_in_steady_decoding_takes_eight_bytes() -> None:
    wire = _Wire({f"chatcmpl-{i:032x}": 0 for i in range(8)})
    lines = [(i, 100) for i in range(8)]
    wire.route(named([RowName(i, name, 0, 0) for i, name in enumerate(wire.owners)], *lines))
    wire.route(tokens(*lines))
    few = len(core_codec().encode(wire.sent[0]))
    wire.route(tokens(*lines[:4]))
    assert few - len(core_codec().encode(wire.sent[0])) == 4 * 8
