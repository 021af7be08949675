"""Publisher of messages over ZeroMQ, like vLLM's publisher of KV events. It has a PUB socket, and a
ROUTER that sends missed messages again.

    PUB      topic | number, 8 bytes, big endian | payload
    ROUTER   request:  (empty) | number of the first message to send again
             replies:  (empty) | number | payload      for each message in the buffer
                       (empty) | -1 | (empty)          at the end

One thread encodes and sends, another one answers requests; the publishing thread never waits. Every
GATHER_S the first thread makes one message of all that was published. Waking it costs the core more
than all the rest here, so the core does so only after GATHER_S without changes. The queue is
bounded, and so are the messages that wait for a slow subscriber; beyond that some are lost. Each
message has the next number, so a subscriber notices what it missed. A change that did not fit into
the queue has no number. Then `publish` returns False, and the caller must notify subscribers.
"""

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire.base.errors import ConfigError, MissingDependency
from quire.base.settings.kv_events import KVEventsConfig, is_bound, shifted

if TYPE_CHECKING:  # an extra
    import zmq

logger = logging.getLogger("quire")

END_SEQ = (-1).to_bytes(8, "big", signed=True)
SEQ_BYTES = 8
GATHER_S = 0.02
MAX_CHANGES_PER_MESSAGE = 256  # maximum changes in one message
END_S = 1.0  # for sending what waits when the engine ends
LINGER_MS = 200
REPLAY_HWM = 2  # messages beyond the buffer's size, so that one request can get the whole buffer

Encode = Callable[[list[Any]], bytes]


class EventPublisher:
    """Sockets of a publisher, and the threads that use them.

    encode: makes a payload of published changes, on the sending thread.
    Raises MissingDependency without pyzmq, ConfigError if an endpoint cannot be used."""

    def __init__(self, config: KVEventsConfig, encode: Encode, core_id: int = 0) -> None:
        self._zmq = _import_zmq()
        self._encode = encode
        self._topic = config.topic.encode()
        self._max_queued = config.max_queue_size
        self._queue: deque[Any] = deque()
        self._wake = threading.Event()
        self._rests = False  # the sending thread waits until it is woken
        self._num_sent = 0
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._buffer_lock = threading.Lock()
        self._takes_more = True
        self._is_closed = False
        self._context = self._zmq.Context()
        self.endpoint = self.replay_endpoint = ""
        try:
            self._open(config, core_id)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._end, self._ended = socket.socketpair()  # closed to end the answering thread
        jobs = [self._send_all] if self._replay is None else [self._send_all, self._answer_all]
        self._threads = [
            threading.Thread(target=job, daemon=True, name=f"quire-kv-events-{i}")
            for i, job in enumerate(jobs)
        ]
        for thread in self._threads:
            thread.start()

    def publish(self, change: Any) -> bool:
        """Queue a change to be sent. Return False if it is lost, because the queue is full or
        sending has ended."""
        if not self._takes_more or len(self._queue) >= self._max_queued:
            return False
        self._queue.append(change)
        if self._rests:
            self._wake.set()
        return True

    def close(self) -> None:
        """Send what waits, for up to a second, and end the threads."""
        if self._is_closed:
            return
        self._is_closed, self._takes_more = True, False
        self._wake.set()
        if threading.current_thread() in self._threads:  # the garbage collector calls this
            threading.Thread(target=self._finish, daemon=True).start()
        else:
            self._finish()

    def _finish(self) -> None:
        """Wait until the threads have ended, and close the sockets."""
        self._threads[0].join(END_S)
        self._end.close()
        for thread in self._threads:
            thread.join(END_S)
        if any(thread.is_alive() for thread in self._threads):
            return  # its socket is in use; it ends with the process
        self._context.destroy(linger=LINGER_MS)
        self._ended.close()

    def _open(self, config: KVEventsConfig, core_id: int) -> None:
        types = self._zmq
        self._pub: zmq.Socket[bytes] = self._context.socket(types.PUB)
        self._pub.set_hwm(config.hwm)
        endpoint = shifted(config.endpoint, core_id)
        attach = self._pub.bind if is_bound(endpoint) else self._pub.connect
        _attach(attach, endpoint, "endpoint")
        self.endpoint = self._pub.getsockopt_string(types.LAST_ENDPOINT)
        self._replay: zmq.Socket[bytes] | None = None
        if config.replay_endpoint is not None:
            self._replay = self._context.socket(types.ROUTER)
            self._replay.set_hwm(config.buffer_steps + REPLAY_HWM)
            endpoint = shifted(config.replay_endpoint, core_id)
            _attach(self._replay.bind, endpoint, "replay_endpoint")
            self.replay_endpoint = self._replay.getsockopt_string(types.LAST_ENDPOINT)

    # ---- the threads -------------------------------------------------------------------------

    def _send_all(self) -> None:
        """Send all that is queued, every GATHER_S. Rest while the queue is empty."""
        try:
            while not self._is_closed:
                if self._queue:
                    self._send_waiting()
                    self._wake.wait(GATHER_S)  # or until it is closed
                    continue
                self._rests = True
                if not self._queue and not self._is_closed:  # `publish` sees `_rests`
                    self._wake.wait()
                self._rests = False
                self._wake.clear()
            self._send_waiting()
        except Exception as error:  # no caller would report it
            logger.error("KV events end: %s: %s", type(error).__name__, error)
            self._takes_more = False

    def _send_waiting(self) -> None:
        while self._queue:
            num = min(len(self._queue), MAX_CHANGES_PER_MESSAGE)
            payload = self._encode([self._queue.popleft() for _ in range(num)])
            number = self._num_sent.to_bytes(SEQ_BYTES, "big")
            self._num_sent += 1
            with self._buffer_lock:
                self._buffer.append((number, payload))
            self._pub.send_multipart((self._topic, number, payload))

    def _answer_all(self) -> None:
        """Answer requests for missed messages until the publisher ends."""
        assert self._replay is not None
        poller = self._zmq.Poller()
        for source in (self._ended, self._replay):
            poller.register(source, self._zmq.POLLIN)
        while self._replay in dict(poller.poll()):
            self._answer(self._replay)

    def _answer(self, replay: "zmq.Socket[bytes]") -> None:
        """Send the requested messages again. This never waits: a ROUTER drops messages beyond its
        bound."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != SEQ_BYTES:
            logger.warning("a request for missed KV events was malformed")
            return
        asker, _, first = frames
        with self._buffer_lock:
            buffered = [each for each in self._buffer if each[0] >= first]
        for number, payload in (*buffered, (END_SEQ, b"")):
            replay.send_multipart((asker, b"", number, payload))


def _attach(attach: Callable[[str], object], endpoint: str, name: str) -> None:
    try:
        attach(endpoint)
    except Exception as error:  # pyzmq's
        raise ConfigError(
            f"kv_events_config's {name} {endpoint!r} cannot be used: {error}; choose another port"
            " or address."
        ) from error


def _import_zmq() -> Any:
    try:
        import zmq
    except ImportError as error:
        raise MissingDependency(
            'kv_events_config needs pyzmq, which is not installed: pip install "quire[events]"'
        ) from error
    return zmq
