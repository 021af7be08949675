"""Messages over real sockets on loopback: order, bounds, and replays of missed messages."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from quire.base.errors import ConfigError, MissingDependency
from quire.base.settings.kv_events import KVEventsConfig
from quire.engine.attachments import event_publisher
from quire.engine.attachments.event_publisher import END_SEQ, EventPublisher

WAIT_MS = 10_000
Message = tuple[int, bytes]


def config(**changed: Any) -> KVEventsConfig:
    given = {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://127.0.0.1:0",
        "replay_endpoint": "tcp://127.0.0.1:0",
        "topic": "kv@here@fox",
    }
    return KVEventsConfig(**given | changed)


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change is a message of its own."""
    monkeypatch.setattr(event_publisher, "MAX_CHANGES_PER_MESSAGE", 1)
    monkeypatch.setattr(event_publisher, "GATHER_S", 0.001)


def joined(changes: list[bytes]) -> bytes:
    return b"|".join(changes)


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def subscribed(context: zmq.Context, publisher: EventPublisher, hwm: int = 1000) -> zmq.Socket:
    """A subscriber that hears, which ZeroMQ tells nobody: something is said until it does."""
    sub = context.socket(zmq.SUB)
    sub.set_hwm(hwm)
    sub.connect(publisher.endpoint)
    sub.setsockopt_string(zmq.SUBSCRIBE, "kv@")
    while not sub.poll(20):
        publisher.publish(b"is anybody there")
    return sub


def heard(sub: zmq.Socket) -> Message:
    assert sub.poll(WAIT_MS), "nothing came"
    topic, number, payload = sub.recv_multipart()
    assert topic == b"kv@here@fox" and len(number) == 8
    return int.from_bytes(number, "big"), payload


def heard_until(sub: zmq.Socket, last: bytes) -> list[Message]:
    found = [heard(sub)]
    while found[-1][1] != last:
        found.append(heard(sub))
    return found


def replayed(context: zmq.Context, publisher: EventPublisher, first: int) -> list[Message]:
    """As vLLM's example asks: by REQ's frames."""
    assert publisher.replay_endpoint
    asker = context.socket(zmq.DEALER)
    asker.connect(publisher.replay_endpoint)
    asker.send_multipart((b"", first.to_bytes(8, "big")))
    found = []
    while True:
        assert asker.poll(WAIT_MS), "no answer"
        empty, number, payload = asker.recv_multipart()
        assert empty == b""
        if number == END_SEQ:
            assert payload == b""
            return found
        found.append((int.from_bytes(number, "big"), payload))


@pytest.mark.usefixtures("one_by_one")
def test_messages_come_in_order_with_numbers_that_go_up(context: zmq.Context) -> None:
    publisher = EventPublisher(config(), lambda changes: b"<%s>" % joined(changes))
    sub = subscribed(context, publisher)
    for i in range(100):
        assert publisher.publish(b"%d" % i)
    found = heard_until(sub, b"<99>")
    numbers = [number for number, _ in found]
    assert numbers == list(range(numbers[0], numbers[0] + len(found)))
    assert [payload for _, payload in found][-100:] == [b"<%d>" % i for i in range(100)]
    publisher.close()


@pytest.mark.usefixtures("one_by_one")
def test_what_was_missed_comes_again(context: zmq.Context) -> None:
    """Of one who came late, and as far as it is kept."""
    publisher = EventPublisher(config(buffer_steps=10), joined)
    for i in range(30):
        publisher.publish(b"%d" % i)
    sub = subscribed(context, publisher)
    publisher.publish(b"last")
    last = heard_until(sub, b"last")[-1][0]
    found = replayed(context, publisher, last - 3)
    assert [number for number, _ in found] == list(range(last - 3, last + 1))
    assert found[-1] == (last, b"last")
    everything = replayed(context, publisher, 0)
    assert [number for number, _ in everything] == list(range(last - 9, last + 1))
    assert replayed(context, publisher, last + 1) == []
    publisher.close()


def test_a_request_that_is_none_is_passed_over(context: zmq.Context) -> None:
    publisher = EventPublisher(config(), joined)
    assert publisher.replay_endpoint
    asker = context.socket(zmq.DEALER)
    asker.connect(publisher.replay_endpoint)
    asker.send_multipart((b"", b"short"))
    asker.send_multipart((b"one frame",))
    publisher.publish(b"x")
    while not (found := replayed(context, publisher, 0)):
        pass  # it is not sent yet
    assert found == [(0, b"x")]
    publisher.close()


@pytest.mark.usefixtures("one_by_one")
def test_a_slow_subscriber_loses_messages_and_holds_up_nobody(context: zmq.Context) -> None:
    publisher = EventPublisher(config(hwm=4, buffer_steps=1000), joined)
    sub = subscribed(context, publisher, hwm=4)
    for i in range(600):  # of 64 KiB: more than any buffer on the way takes
        assert publisher.publish(b"%03d" % i + bytes(1 << 16))
    publisher.publish(b"last")
    others = replayed(context, publisher, 0)
    while others[-1][1] != b"last":  # the thread was not held up, it sends what waits
        others = replayed(context, publisher, 0)
    found = []
    while sub.poll(100):
        found.append(heard(sub))
    numbers = [number for number, _ in found]
    assert len(numbers) < 600 and numbers == sorted(set(numbers))
    missed = set(range(numbers[0], others[-1][0] + 1)) - set(numbers)
    kept = dict(others)
    assert missed and missed <= kept.keys(), "what it missed can be had"
    publisher.close()


@pytest.mark.usefixtures("one_by_one")
def test_what_waits_has_a_bound() -> None:
    goes_on = threading.Event()
    publisher = EventPublisher(config(max_queue_size=5), lambda m: joined(m * goes_on.wait(10)))
    taken = 0
    while publisher.publish(b"x"):
        taken += 1
        assert taken < 10, "one is being encoded, and five wait"
    goes_on.set()
    publisher.close()
    assert not publisher.publish(b"too late")


@pytest.mark.usefixtures("one_by_one")
def test_what_waits_is_sent_at_the_end(context: zmq.Context) -> None:
    publisher = EventPublisher(config(), joined)
    sub = subscribed(context, publisher)
    for i in range(50):
        publisher.publish(b"%d" % i)
    publisher.close()
    publisher.close()
    assert heard_until(sub, b"49")[-1][1] == b"49"
    again = EventPublisher(config(endpoint=publisher.endpoint), joined)  # nothing holds the port
    again.close()


def test_a_message_that_cannot_be_made_ends_it_and_frees_the_port(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def encode(changes: list[bytes]) -> bytes:
        raise ValueError("not this one")

    publisher = EventPublisher(config(), encode)
    publisher.publish(b"x")
    while publisher.publish(b"y"):  # until its thread has seen the first one
        pass
    assert "KV events end: ValueError: not this one" in caplog.text
    publisher.close()
    EventPublisher(config(endpoint=publisher.endpoint), joined).close()


def test_what_comes_while_one_is_sent_is_the_next_message(context: zmq.Context) -> None:
    goes_on, encoded = threading.Event(), []

    def encode(changes: list[bytes]) -> bytes:
        encoded.append(list(changes))
        assert goes_on.wait(10)
        return joined(changes)

    publisher = EventPublisher(config(), encode)
    publisher.publish(b"first")
    while not encoded:
        pass  # its thread is to wake first
    everything = [b"%d" % i for i in range(300)]
    for change in everything:
        assert publisher.publish(change)
    goes_on.set()
    publisher.close()
    assert encoded == [[b"first"], everything[:256], everything[256:]]


def test_a_publisher_at_rest_is_woken_by_each_first_change(context: zmq.Context) -> None:
    """Many times in turn: what comes just when it goes to rest must not stay."""
    publisher = EventPublisher(config(), joined)
    sub = subscribed(context, publisher)
    for i in range(20):
        publisher.publish(b"%d" % i)
        while heard(sub)[1].split(b"|")[-1] != b"%d" % i:
            pass
    publisher.close()


def test_it_may_be_closed_by_a_thread_of_its_own(context: zmq.Context) -> None:
    """The garbage collector closes in whatever thread it runs."""
    publishers: list[EventPublisher] = []

    def encode(changes: list[bytes]) -> bytes:
        publishers[0].close()
        return joined(changes)

    publishers.append(EventPublisher(config(), encode))
    publishers[0].publish(b"x")
    publishers[0]._threads[0].join(10)
    while not publishers[0]._context.closed:
        pass  # by another thread, which waits for this one
    assert not publishers[0].publish(b"y")


def test_an_endpoint_that_cannot_be_had() -> None:
    publisher = EventPublisher(config(), joined)
    with pytest.raises(ConfigError, match=r"endpoint 'tcp://127.*cannot be used.*another port"):
        EventPublisher(config(endpoint=publisher.endpoint), joined)
    with pytest.raises(ConfigError, match="replay_endpoint"):
        EventPublisher(config(replay_endpoint=publisher.replay_endpoint), joined)
    publisher.close()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zmq", None)
    with pytest.raises(MissingDependency, match=r'pip install "quire\[events\]"'):
        event_publisher._import_zmq()
