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
def one_change_per_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send each change as a message of its own."""
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
    """Return a connected subscriber. ZeroMQ reports no connection, so publish until one arrives."""
    sub = context.socket(zmq.SUB)
    sub.set_hwm(hwm)
    sub.connect(publisher.endpoint)
    sub.setsockopt_string(zmq.SUBSCRIBE, "kv@")
    while not sub.poll(20):
        publisher.publish(b"is anybody there")
    return sub


def receive(sub: zmq.Socket) -> Message:
    assert sub.poll(WAIT_MS), "no message came"
    topic, number, payload = sub.recv_multipart()
    assert topic == b"kv@here@fox" and len(number) == 8
    return int.from_bytes(number, "big"), payload


def receive_until(sub: zmq.Socket, last: bytes) -> list[Message]:
    found = [receive(sub)]
    while found[-1][1] != last:
        found.append(receive(sub))
    return found


def replayed(context: zmq.Context, publisher: EventPublisher, first: int) -> list[Message]:
    """Request a replay with REQ frames, as vLLM's example does."""
    assert publisher.replay_endpoint
    dealer = context.socket(zmq.DEALER)
    dealer.connect(publisher.replay_endpoint)
    dealer.send_multipart((b"", first.to_bytes(8, "big")))
    found = []
    while True:
        assert dealer.poll(WAIT_MS), "no answer"
        empty, number, payload = dealer.recv_multipart()
        assert empty == b""
        if number == END_SEQ:
            assert payload == b""
            return found
        found.append((int.from_bytes(number, "big"), payload))


@pytest.mark.usefixtures("one_change_per_message")
def test_messages_arrive_in_order_with_increasing_numbers(context: zmq.Context) -> None:
    publisher = EventPublisher(config(), lambda changes: b"<%s>" % joined(changes))
    sub = subscribed(context, publisher)
    for i in range(100):
        assert publisher.publish(b"%d" % i)
    found = receive_until(sub, b"<99>")
    numbers = [number for number, _ in found]
    assert numbers == list(range(numbers[0], numbers[0] + len(found)))
    assert [payload for _, payload in found][-100:] == [b"<%d>" % i for i in range(100)]
    publisher.close()


@pytest.mark.usefixtures("one_change_per_message")
def test_missed_messages_are_replayed(context: zmq.Context) -> None:
    """A late subscriber gets the messages that are still in the buffer."""
    publisher = EventPublisher(config(buffer_steps=10), joined)
    for i in range(30):
        publisher.publish(b"%d" % i)
    sub = subscribed(context, publisher)
    publisher.publish(b"last")
    last = receive_until(sub, b"last")[-1][0]
    found = replayed(context, publisher, last - 3)
    assert [number for number, _ in found] == list(range(last - 3, last + 1))
    assert found[-1] == (last, b"last")
    everything = replayed(context, publisher, 0)
    assert [number for number, _ in everything] == list(range(last - 9, last + 1))
    assert replayed(context, publisher, last + 1) == []
    publisher.close()


def test_malformed_replay_requests_are_ignored(context: zmq.Context) -> None:
    publisher = EventPublisher(config(), joined)
    assert publisher.replay_endpoint
    dealer = context.socket(zmq.DEALER)
    dealer.connect(publisher.replay_endpoint)
    dealer.send_multipart((b"", b"short"))
    dealer.send_multipart((b"one frame",))
    publisher.publish(b"x")
    while not (found := replayed(context, publisher, 0)):
        pass  # the message is not sent yet
    assert found == [(0, b"x")]
    publisher.close()


@pytest.mark.usefixtures("one_change_per_message")
def test_slow_subscriber_loses_messages_and_blocks_nobody(context: zmq.Context) -> None:
    publisher = EventPublisher(config(hwm=4, buffer_steps=1000), joined)
    sub = subscribed(context, publisher, hwm=4)
    for i in range(600):  # of 64 KiB: more than all buffers on the way can take
        assert publisher.publish(b"%03d" % i + bytes(1 << 16))
    publisher.publish(b"last")
    buffered = replayed(context, publisher, 0)
    while buffered[-1][1] != b"last":  # the thread is not blocked and sends the queue
        buffered = replayed(context, publisher, 0)
    found = []
    while sub.poll(100):
        found.append(receive(sub))
    numbers = [number for number, _ in found]
    assert len(numbers) < 600 and numbers == sorted(set(numbers))
    missed = set(range(numbers[0], buffered[-1][0] + 1)) - set(numbers)
    replayable = dict(buffered)
    assert missed and missed <= replayable.keys(), "missed messages can be replayed"
    publisher.close()


@pytest.mark.usefixtures("one_change_per_message")
def test_queue_of_changes_is_bounded() -> None:
    resume = threading.Event()
    publisher = EventPublisher(config(max_queue_size=5), lambda m: joined(m * resume.wait(10)))
    taken = 0
    while publisher.publish(b"x"):
        taken += 1
        assert taken < 10, "one is being encoded, and five wait"
    resume.set()
    publisher.close()
    assert not publisher.publish(b"too late")


@pytest.mark.usefixtures("one_change_per_message")
def test_close_sends_the_queued_messages(context: zmq.Context) -> None:
    publisher = EventPublisher(config(), joined)
    sub = subscribed(context, publisher)
    for i in range(50):
        publisher.publish(b"%d" % i)
    publisher.close()
    publisher.close()
    assert receive_until(sub, b"49")[-1][1] == b"49"
    again = EventPublisher(config(endpoint=publisher.endpoint), joined)  # the port is free
    again.close()


def test_encoding_error_ends_the_publisher_and_frees_the_port(
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


def test_changes_during_encoding_join_the_next_messages(context: zmq.Context) -> None:
    resume, encoded = threading.Event(), []

    def encode(changes: list[bytes]) -> bytes:
        encoded.append(list(changes))
        assert resume.wait(10)
        return joined(changes)

    publisher = EventPublisher(config(), encode)
    publisher.publish(b"first")
    while not encoded:
        pass  # until its thread is awake
    everything = [b"%d" % i for i in range(300)]
    for change in everything:
        assert publisher.publish(change)
    resume.set()
    publisher.close()
    assert encoded == [[b"first"], everything[:256], everything[256:]]


def test_change_wakes_an_idle_publisher(context: zmq.Context) -> None:
    """Repeated, since a change that comes just as the thread goes idle must not get stuck."""
    publisher = EventPublisher(config(), joined)
    sub = subscribed(context, publisher)
    for i in range(20):
        publisher.publish(b"%d" % i)
        while receive(sub)[1].split(b"|")[-1] != b"%d" % i:
            pass
    publisher.close()


def test_publisher_may_be_closed_by_its_own_thread(context: zmq.Context) -> None:
    """The garbage collector closes in whatever thread it runs."""
    publishers: list[EventPublisher] = []

    def encode(changes: list[bytes]) -> bytes:
        publishers[0].close()
        return joined(changes)

    publishers.append(EventPublisher(config(), encode))
    publishers[0].publish(b"x")
    publishers[0]._threads[0].join(10)
    while not publishers[0]._context.closed:
        pass  # another thread closes it, after this thread's end
    assert not publishers[0].publish(b"y")


def test_unavailable_endpoint_is_rejected() -> None:
    publisher = EventPublisher(config(), joined)
    with pytest.raises(ConfigError, match=r"endpoint 'tcp://127.*cannot be used.*another port"):
        EventPublisher(config(endpoint=publisher.endpoint), joined)
    with pytest.raises(ConfigError, match="replay_endpoint"):
        EventPublisher(config(replay_endpoint=publisher.replay_endpoint), joined)
    publisher.close()


def test_missing_zmq_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zmq", None)
    with pytest.raises(MissingDependency, match=r'pip install "quire\[events\]"'):
        event_publisher._import_zmq()
