"""Process of a rank: python -m quire.engine.ranks.rank_main, started by its core or node agent.

It loads its part of the model and handles messages from the inherited socket until the core closes
it. On a CPU one thread does everything: a step that needs masks reads the socket for them. On a GPU
one thread reads messages, one launches plans, and one waits for results
(engine/executors/launching.py). Another thread sends heartbeats, which report the rank's progress.
"""

import argparse
import contextlib
import logging
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec
import numpy as np

import quire
from quire.base.errors import EngineError, QuireError
from quire.base.masks import MaskPromise, TokenMasks
from quire.base.plan import StepResult
from quire.base.settings.config import EngineConfig
from quire.engine.connectors.identity import fingerprint_of_part
from quire.engine.executors.executor import failed_step
from quire.engine.executors.loaded import LoadedElsewhere
from quire.engine.executors.local import LocalModel, build_local
from quire.engine.executors.threaded import lower_priority
from quire.engine.observability.starvation import Starvation, read_threads
from quire.engine.ranks.consistency import facts_of
from quire.engine.ranks.messages import (
    AdapterLoaded,
    Beat,
    Begin,
    CloseStores,
    CoreDisconnected,
    Done,
    Drafted,
    Failed,
    FromRank,
    Idle,
    Idled,
    Joined,
    LoadAdapter,
    Loaded,
    Loading,
    Masks,
    Order,
    PoolMinimum,
    Step,
    StoreOrders,
    Stream,
    ToRank,
    rank_codec,
)
from quire.engine.ranks.rank_stores import RankStores, open_part
from quire.engine.wire.child import NO_START, begin_child, collecting_rarely
from quire.models.checkpoint.rank_place import RankPlace
from quire.models.checkpoint.source import ModelSource, resolve_source
from quire.ops.collective import ALONE, RankGroup
from quire.ops.collectives.shared_group import SharedGroup
from quire.runner.build import build_runner, choose_device
from quire.runner.memory_plan import MachineShare
from quire.runner.setup.built import BuiltRunner
from quire.runner.stage import SocketLink, StageLinks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


BEAT_S = 0.5  # between two heartbeats
OURS = str(Path(quire.__file__).parent)
MAX_THREADS = 4  # threads that a heartbeat describes
MAX_PATH_PARTS = 3  # path components in such a description


class Beats:
    """Heartbeats of a rank, sent on a thread of their own until `send` raises `closed_error`.
    number: last step that the rank began, set by the owner; -1 before the first. counts: returns
    the numbers of exchanges and token-expert pairs; called on that thread."""

    def __init__(
        self,
        send: Callable[[Beat], None],
        counts: Callable[[], tuple[int, int]],
        closed_error: type[Exception],
    ) -> None:
        self.number = -1
        self._send, self._counts, self._closed_error = send, counts, closed_error
        threading.Thread(target=self._run, name="quire-beats", daemon=True).start()

    def _run(self) -> None:
        pid = os.getpid()
        starvation = Starvation(lambda: read_threads(pid), time.monotonic())
        while True:
            try:
                num_exchanges, expert_pairs = self._counts()
                starvation.look(time.monotonic())
                starved_s = starvation.starved_s
                self._send(
                    Beat(self.number, num_exchanges, thread_positions(), expert_pairs, starved_s)
                )
            except self._closed_error:
                return
            time.sleep(BEAT_S)


def thread_positions() -> str:
    """Describe the current code positions of this process's other threads, oldest thread first."""
    own, frames = threading.get_ident(), sys._current_frames()
    others = [thread for thread in threading.enumerate() if thread.ident not in (own, None)]
    found = [
        f"{thread.name} at {code_position(frames[thread.ident])}"
        for thread in others[:MAX_THREADS]
        if thread.ident in frames
    ]
    return "; ".join(found)


def code_position(frame: FrameType) -> str:
    """Describe a frame's code position; for foreign code, add the calling position in quire."""
    here, each = _line(frame), frame
    while not each.f_code.co_filename.startswith(OURS) and each.f_back is not None:
        each = each.f_back
    ours = _line(each)
    return here if here == ours else f"{here}, from {ours}"


def _line(frame: FrameType) -> str:
    code = frame.f_code
    path = "/".join(Path(code.co_filename).parts[-MAX_PATH_PARTS:])
    return f"{path}:{frame.f_lineno} ({code.co_name})"


logger = logging.getLogger("quire")

PROGRESS_S = 0.1  # minimum time between two Loading messages


class Link:
    """Rank's end of its connection to the core. pending: received messages, not yet handled."""

    def __init__(self, sock: socket.socket) -> None:
        self.pending: deque[ToRank] = deque()
        self.socket = sock
        self._stream = Stream(sock, rank_codec())

    def send(self, message: FromRank) -> None:
        """Send a message, from any thread. Raises CoreDisconnected."""
        try:
            self._stream.send(message)
        except OSError:
            raise CoreDisconnected from None

    def take_in(self) -> None:
        """Wait for bytes, and append the complete messages to `pending`. Raises
        CoreDisconnected."""
        messages = self._stream.receive()
        if messages is None:
            raise CoreDisconnected
        self.pending.extend(messages)

    def receive(self) -> ToRank:
        """Wait for the next message and return it. Raises CoreDisconnected."""
        while not self.pending:
            self.take_in()
        return self.pending.popleft()


class FetchedMasks(MaskPromise):
    """Promise of masks whose waiting thread reads the socket itself. fetch: reads messages and
    puts the masks among them into their promises."""

    def __init__(self, fetch: Callable[[], None]) -> None:
        super().__init__()
        self._fetch = fetch

    def wait(self) -> TokenMasks:
        while not self.is_there:
            self._fetch()
        return super().wait()


class RankLoop:
    """Message loop of a rank. beats: heartbeats, which report the step that `run` begins. answers:
    whether this rank sends the results of steps to the core. stores: stores of KV blocks; None
    without any."""

    def __init__(
        self,
        link: Link,
        local: LocalModel,
        beats: Beats,
        *,
        answers: bool,
        stores: RankStores | None = None,
    ) -> None:
        self._link, self._local, self._beats, self._answers = link, local, beats, answers
        self._stores = stores
        self._promises: dict[int, MaskPromise] = {}  # by step number
        self._numbers: deque[int] = deque()  # numbers of the executor's outstanding steps
        self._has_failed = False  # plans after a failed one are skipped until all are answered
        self._bell_in, self._bell_out = socket.socketpair()
        self._bell_in.setblocking(False)
        local.executor.start(self._ring)

    def run(self) -> None:
        """Handle messages and send results, until CoreDisconnected is raised."""
        link = self._link
        while True:
            if self._numbers:  # an asynchronous device is computing
                readable, _, _ = select.select([link.socket, self._bell_out], [], [])
                if self._bell_out in readable:
                    self._bell_out.recv(64)
                if link.socket in readable:
                    link.take_in()
            else:
                link.take_in()
            while link.pending:
                self._take(link.pending.popleft())
                self._answer()
            self._answer()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._bell_in.send(b"x")

    def _take(self, message: ToRank) -> None:
        local = self._local
        if isinstance(message, Step):
            self._begin(message)
        elif isinstance(message, Masks):
            self._put(message)
        elif isinstance(message, Order):
            self._link.send(self._draft(message))
        elif isinstance(message, Idle):
            self._link.send(Idled(has_more=_useful(local.idle)))
        elif isinstance(message, StoreOrders | CloseStores) and self._stores is not None:
            self._stores.put(message)
        elif isinstance(message, LoadAdapter):
            threading.Thread(
                target=self._load_adapter, args=(message,), name="quire-adapters", daemon=True
            ).start()
        else:
            raise EngineError(f"a rank does not expect {type(message).__name__}")

    def _begin(self, step: Step) -> None:
        self._beats.number = step.number
        masks = None
        if step.has_masks:
            masks = MaskPromise() if self._local.built.is_async else FetchedMasks(self._fetch_masks)
            self._promises[step.number] = masks
        if step.is_first:
            self._has_failed = False
        if self._has_failed and not self._numbers:
            self._local.built.skip(step.plan)
            self._send(step.number, failed_step(step.plan, "a step before it failed"))
            return
        self._numbers.append(step.number)
        self._local.executor.submit(step.plan, masks)

    def _fetch_masks(self) -> None:
        """Put pending masks into their promises; read the socket if there are none."""
        pending = self._link.pending
        found = [message for message in pending if isinstance(message, Masks)]
        if not found:
            self._link.take_in()
            return
        for message in found:
            pending.remove(message)
            self._put(message)

    def _put(self, message: Masks) -> None:
        self._promises.pop(message.number).put(message.masks)

    def _answer(self) -> None:
        """Send the results of steps that have ended."""
        executor = self._local.executor
        while self._numbers and executor.is_ready():
            result = executor.next_result()
            self._has_failed |= result.error is not None
            self._send(self._numbers.popleft(), result)

    def _send(self, number: int, result: StepResult) -> None:
        self._link.send(Done.of(number, result, answers=self._answers))

    def _load_adapter(self, message: LoadAdapter) -> None:
        """Load an adapter alongside the steps, and report the result."""
        lower_priority()
        error = None
        try:
            self._local.built.load_adapter(message.slot, message.adapter_id, message.path)
        except QuireError as raised:
            error = str(raised)
        except Exception as raised:
            error = f"the adapter cannot be loaded: {type(raised).__name__}: {raised}"
        with contextlib.suppress(CoreDisconnected):
            self._link.send(AdapterLoaded(error))

    def _draft(self, message: Order) -> Drafted:
        try:
            return Drafted.of(self._local.draft(message.order))
        except Exception as error:
            logger.debug("drafting failed", exc_info=error)
            nothing = np.empty(0, np.int32)
            return Drafted(nothing, 0, 0.0, f"{type(error).__name__}: {error}")


def _useful(idle: Callable[[], bool]) -> bool:
    try:
        return idle()
    except Exception:
        logger.warning("no more graphs are recorded", exc_info=True)
        return False


def main() -> int:
    """Join the other ranks, load the model and handle messages; return the exit status."""
    options = _arguments()
    begin_child(options.log_level)
    own = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig | None)
    link = Link(socket.socket(fileno=options.socket))
    try:
        with contextlib.suppress(CoreDisconnected):
            _serve(link, own, options)
        return 0
    except Exception as error:
        kind = type(error).__name__ if isinstance(error, QuireError) else "EngineError"
        message = (
            str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
        )
        if not isinstance(error, QuireError):
            logger.error("the rank cannot continue", exc_info=error)
        with contextlib.suppress(CoreDisconnected):
            link.send(Failed(kind, message))
        return NO_START


def _serve(link: Link, own: EngineConfig | None, options: argparse.Namespace) -> None:
    begin = link.receive()
    assert isinstance(begin, Begin)
    config, source = begin.config, begin.source
    if own is not None:  # this machine has its own configuration
        config = own
        source = resolve_source(own.model, progress=False)
    link.send(Joined(facts_of(config, source)))
    place, links = _place(config, begin.rank, options), _links(options)
    share = MachineShare(begin.num_local, begin.free_bytes, lambda values: _minimum(link, values))
    local = build_local(
        lambda: build_runner(config, source, _progress(link), place, share, links),
        config.device,
        is_threaded=False,
        idles=False,
    )
    answers = begin.rank == config.parallel.answering_rank
    stores = _stores(local.built, source, begin.rank, link)
    link.send(Loaded(LoadedElsewhere.of(local.built)))
    beats = Beats(
        link.send, lambda: (place.tensor.num_exchanges, local.built.expert_pairs), CoreDisconnected
    )
    loop = RankLoop(link, local, beats, answers=answers, stores=stores)
    with collecting_rarely():
        loop.run()


def _stores(built: BuiltRunner, source: ModelSource, rank: int, link: Link) -> RankStores | None:
    """Open the configured stores for this rank; None without any, or without prefix caching, which
    the core reports. Raises ConfigError."""
    cache = built.config.cache
    if not cache.stores or built.host_limits is None:
        return None
    fingerprint = fingerprint_of_part(built, source, rank)
    memory = built.runner.backend.host_blocks
    return open_part(cache, fingerprint, memory, built.backend_name, link.send)


def _place(config: EngineConfig, rank: int, options: argparse.Namespace) -> RankPlace:
    """Join the ranks that share a rank's layers; return the rank's part of the model."""
    parallel = config.parallel
    return RankPlace(
        _tensor_group(config, rank, options),
        rank // parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        has_whole_experts=parallel.enable_expert_parallel,
        sharing=parallel.decode_context_parallel_size,
    )


def _tensor_group(config: EngineConfig, rank: int, options: argparse.Namespace) -> RankGroup:
    """Join the ranks that share each layer and return their group. On one machine they exchange
    data over shared memory or NCCL; with a store in the core, over the network."""
    size = config.parallel.tensor_parallel_size
    if size == 1:
        return ALONE
    here, device, in_order = rank % size, choose_device(config.device), config.deterministic
    path, is_far = f"/proc/self/fd/{options.group}", options.store >= 0
    if device.type == "cpu" and not is_far:
        return SharedGroup(path, here, size)
    from quire.ops.collectives.torch_group import file_store, gloo_group, nccl_group

    store = file_store(path, size) if not is_far else _far_store(options.store, rank // size)
    if device.type == "cpu":
        return gloo_group(store, here, size, hostname=options.host, in_order=in_order)
    return nccl_group(store, here, size, device, in_order=in_order)


def _far_store(fd: int, stage: int) -> "Store":
    from quire.engine.ranks.core_store import CoreStore

    return CoreStore(socket.socket(fileno=fd), f"stage {stage}")


def _links(options: argparse.Namespace) -> StageLinks:
    """Return the inherited sockets to the previous and the next stage."""
    before, next_stage = (
        None if fd < 0 else SocketLink(socket.socket(fileno=fd))
        for fd in (options.before, options.next_stage)
    )
    return StageLinks(before, next_stage)


def _minimum(link: Link, values: Sequence[int]) -> tuple[int, ...]:
    """Send this rank's limits to the core; return the minimum of each over all ranks."""
    link.send(PoolMinimum(tuple(values)))
    answer = link.receive()
    assert isinstance(answer, PoolMinimum)
    return answer.values


def _progress(link: Link) -> Callable[[int, int], None]:
    """Return a function that reports loading progress to the core, at most once per PROGRESS_S. It
    sends on the calling thread, which is safe: no other thread sends during loading."""
    reported_s = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal reported_s
        now_s = time.monotonic()
        if done >= total or now_s - reported_s >= PROGRESS_S:
            reported_s = now_s
            link.send(Loading(done, total))

    return progress


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=int, required=True, help="descriptor of the connection")
    parser.add_argument("--group", type=int, default=-1, help="memory shared with its stage")
    parser.add_argument("--store", type=int, default=-1, help="connection to the core's store")
    parser.add_argument("--host", default="", help="its machine's address, for ranks elsewhere")
    parser.add_argument("--before", type=int, default=-1, help="socket to the stage before")
    parser.add_argument("--next-stage", type=int, default=-1, help="socket to the next stage")
    parser.add_argument("--log-level", default="warning")
    return parser.parse_args()


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)  # a collective that never ends may hold threads and devices
