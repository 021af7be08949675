"""The thread that watches ranks, over a transport of socket pairs without processes."""

import socket
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue
from selectors import EVENT_READ

import pytest

from quire.base.errors import ConfigError, RankLost
from quire.engine.ranks.messages import (
    Failed,
    FromRank,
    Idle,
    Idled,
    Stream,
    ToRank,
    core_codec,
    rank_codec,
)
from quire.engine.ranks.rank_set import Rank, RankSet, RankWatch

WAIT_S = 10.0


class Pairs:
    """theirs: the ranks' ends of the connections. calls: the calls that the watch has made."""

    def __init__(self, num: int, error: Exception | None = None) -> None:
        self._error = error
        pairs = [socket.socketpair() for _ in range(num)]
        self.ranks: Sequence[Rank] = [
            Rank(number=number, stream=Stream(ours, core_codec()), pid=100 + number)
            for number, (ours, _) in enumerate(pairs)
        ]
        self.theirs: list[Stream[ToRank]] = [Stream(theirs, rank_codec()) for _, theirs in pairs]
        self.calls: list[str] = []

    def begin(self, watch: RankWatch) -> None:
        if self._error is not None:
            raise self._error
        for rank in self.ranks:
            assert rank.stream is not None
            watch.selector.register(rank.stream.socket, EVENT_READ, partial(watch.read, rank))

    @property
    def is_complete(self) -> bool:
        return True

    def shares(self) -> list[tuple[int, int]]:
        return [(1, 7)] * len(self.ranks)

    def look(self, now_s: float) -> None:
        pass

    def stop(self, error: RankLost) -> None:
        self.calls.append("stop")

    def end(self, loss: RankLost | None) -> None:
        self.calls.append("end" if loss is None else "end after a loss")
        for rank, stream in zip(self.ranks, self.theirs, strict=True):
            assert rank.stream is not None
            rank.stream.socket.close()
            stream.socket.close()


class Listener:
    def __init__(self) -> None:
        self.messages: SimpleQueue[tuple[int, FromRank]] = SimpleQueue()
        self.losses: SimpleQueue[RankLost] = SimpleQueue()

    def hear(self, rank: int, message: FromRank) -> None:
        self.messages.put((rank, message))

    def lose(self, error: RankLost) -> None:
        self.losses.put(error)

    def tick(self) -> None:
        pass


def test_messages_pass_both_ways_and_close_ends_once() -> None:
    pairs, listener = Pairs(2), Listener()
    ranks = RankSet(pairs, listener)
    assert ranks.shares() == [(1, 7)] * 2
    ranks.link.send(Idle())
    assert [stream.receive() for stream in pairs.theirs] == [[Idle()]] * 2
    pairs.theirs[1].send(Idled(has_more=True))
    assert listener.messages.get(timeout=WAIT_S) == (1, Idled(has_more=True))
    ranks.close()
    ranks.close()
    assert pairs.calls == ["end"] and listener.losses.empty()


def test_failing_rank_is_reported_once_and_stops_all() -> None:
    pairs, listener = Pairs(2), Listener()
    ranks = RankSet(pairs, listener)
    pairs.theirs[1].send(Failed("EngineError", "no memory"))
    error = listener.losses.get(timeout=WAIT_S)
    assert str(error) == "rank 1 of 2 (process 101) cannot continue: EngineError: no memory"
    ranks.link.give_up(0, "is late")
    later = Listener()
    ranks.link.set_listener(later)
    assert later.losses.get_nowait() is error and listener.losses.empty()
    ranks.close()
    assert pairs.calls == ["stop", "end after a loss"]


def test_start_error_is_raised_to_waiting_callers() -> None:
    pairs, listener = Pairs(1, ConfigError("there is no room")), Listener()
    ranks = RankSet(pairs, listener)
    with pytest.raises(ConfigError, match="there is no room"):
        ranks.wait()
    assert pairs.calls == ["stop", "end after a loss"]
    assert isinstance(listener.losses.get_nowait(), RankLost)


def test_unreadable_message_loses_the_ranks() -> None:
    pairs, listener = Pairs(1), Listener()
    ranks = RankSet(pairs, listener)
    pairs.theirs[0].socket.sendall(b"\1\0\0\0\xc1")
    assert "a message that is not quire's" in str(listener.losses.get(timeout=WAIT_S))
    ranks.close()
