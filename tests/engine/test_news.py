"""What a step gave, as messages over connections: every token reaches its owner under its name."""

from dataclasses import dataclass

import numpy as np

from quire.base.messages import NewTokens, SequenceOutput, StepMessage
from quire.engine.news import News, PlainTokens, StepReader, StepWriter
from quire.engine.wire import LENGTH, client_codec, core_codec


@dataclass
class _Request:
    request_id: str


@dataclass
class _Sequence:
    request: _Request
    arrival: int
    index: int = 0
    num_cached_tokens: int = 0


def _sequence(request_id: str, arrival: int, index: int = 0, cached: int = 0) -> _Sequence:
    return _Sequence(_Request(request_id), arrival, index, cached)


def _plain(*lines: tuple[int, _Sequence, int]) -> PlainTokens:
    """lines: row, sequence, token."""
    sequences = np.empty(len(lines), object)
    sequences[:] = [sequence for _, sequence, _ in lines]
    return PlainTokens(
        sequences,
        np.array([token for *_, token in lines], np.int32),
        np.array([row for row, *_ in lines], np.int32),
        np.array([sequence.arrival for _, sequence, _ in lines], np.int64),
    )


class _Wire:
    """A writer, and a reader for each client, behind the real encoding."""

    def __init__(self, owners: dict[str, int]) -> None:
        self.owners = owners
        self.writer = StepWriter(8, owners.get)
        self.readers: dict[int, StepReader] = {}
        self.sent: dict[int, StepMessage] = {}

    def pass_on(self, news: News) -> dict[int, list[tuple[str, int, list[int], int]]]:
        self.sent = self.writer.write(news)
        found = {}
        for client, message in self.sent.items():
            body = core_codec().encode(message)[LENGTH.size :]
            received = client_codec().decode(body)
            assert isinstance(received, StepMessage)
            reader = self.readers.setdefault(client, StepReader())
            found[client] = [
                (o.request_id, o.index, o.token_ids, o.num_cached_tokens)
                for o in reader.read(received)
            ]
        return found

    def num_names(self, client: int) -> int:
        tokens = self.sent[client].tokens
        assert isinstance(tokens, NewTokens)
        return len(tokens.names)


def test_names_are_told_once() -> None:
    wire = _Wire({"a": 3, "b": 3})
    first, second = _sequence("a", 10, 1, 16), _sequence("b", 12)
    news = News(_plain((0, first, 7), (5, second, 2**31 - 1)))
    assert wire.pass_on(news) == {3: [("a", 1, [7], 16), ("b", 0, [2**31 - 1], 0)]}
    assert wire.num_names(3) == 2
    assert wire.pass_on(News(_plain((5, second, 1)))) == {3: [("b", 0, [1], 0)]}
    assert wire.num_names(3) == 0


def test_a_row_that_somebody_else_took_gets_a_new_name() -> None:
    """Also where the next one has the same request id: the arrival number tells them apart."""
    wire = _Wire({"a": 0, "b": 0})
    wire.pass_on(News(_plain((2, _sequence("a", 1, 0, 32), 7))))
    assert wire.pass_on(News(_plain((2, _sequence("b", 2), 8)))) == {0: [("b", 0, [8], 0)]}
    again = News(_plain((2, _sequence("b", 3, 0, 48), 9)))
    assert wire.pass_on(again) == {0: [("b", 0, [9], 48)]}


def test_each_client_gets_its_own() -> None:
    wire = _Wire({"a": 0, "b": 1, "c": 0})
    lines = [(i, _sequence(name, i), 10 + i) for i, name in enumerate("abcd")]
    other = SequenceOutput("b", [5], "stop")
    expected = {
        0: [("a", 0, [10], 0), ("c", 0, [12], 0)],
        1: [("b", 0, [11], 0), ("b", 0, [5], 0)],
    }
    for _ in range(2):  # nobody wants what the fourth has
        assert wire.pass_on(News(_plain(*lines), [other])) == expected
    assert wire.num_names(0) == wire.num_names(1) == 0


def test_news_without_plain_tokens() -> None:
    wire = _Wire({"a": 4})
    news = News(None, [SequenceOutput("a", [], "length"), SequenceOutput("gone", [1])])
    assert wire.pass_on(news) == {4: [("a", 0, [], 0)]}
    assert not News() and not News(_plain()) and news
    assert wire.pass_on(News(_plain())) == {}


def test_a_steady_token_takes_eight_bytes() -> None:
    wire = _Wire({f"chatcmpl-{i:032x}": 0 for i in range(8)})
    lines = [(i, _sequence(name, i), 100) for i, name in enumerate(wire.owners)]
    wire.pass_on(News(_plain(*lines)))
    wire.pass_on(News(_plain(*lines)))
    few = len(core_codec().encode(wire.sent[0]))
    wire.pass_on(News(_plain(*lines[:4])))
    assert few - len(core_codec().encode(wire.sent[0])) == 4 * 8
