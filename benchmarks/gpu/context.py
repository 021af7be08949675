"""Shared code of the pieces: the device, the remaining time, the report, the timing of a function.

On a GPU, events around the replay of a CUDA graph time a function. First the graph holds the
function once, and memory as large as several L2 caches is written before. So the replay finds no
data of its own in the cache, and the host is always ahead. Then the graph holds it many times,
warm, without the cost of starting a graph. A function that cannot be captured is timed launch by
launch, and its row says so.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from benchmarks.gpu.floors import Cost, Limits
from benchmarks.gpu.report import Report

FLUSH_BYTES = 512 << 20
WARM_COPIES = 10
MAX_REPEATS, MIN_REPEATS = 50, 5
CASE_S = 0.25  # spent on the repeats of one case, if it is not slower


Made = tuple[Callable[[], object], Cost]  # what is timed, and what it costs at least


class OutOfTime(Exception):
    """The piece's time is used up: what there is has been written."""


@dataclass(frozen=True)
class Timing:
    """cold_s: median with nothing in the L2 cache; warm_s: mean of calls one after the other. mode:
    graph, eager, or cpu."""

    cold_s: float
    warm_s: float
    mode: str
    why: str = ""

    @property
    def detail(self) -> dict[str, str]:
        """Return the details of the timing for a row."""
        found = {"warm": f"{self.warm_s * 1e6:.1f} us"}
        if self.mode != "graph":
            found["timed"] = self.mode + (f" ({self.why})" if self.why else "")
        return found


@dataclass
class Bench:
    """until: time.monotonic() at which the piece shall end. measured: this machine's limits."""

    device: torch.device
    report: Report
    until: float
    is_tiny: bool = False
    measured: Limits | None = None
    runs_once: bool = False  # calls each function once, for tools that watch it
    seed: int = 0
    _flush: torch.Tensor | None = field(default=None, repr=False)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def num_cores(self) -> int:
        """Return the device's multiprocessors; an H200's on a CPU."""
        if not self.is_cuda:
            return 132
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16; float32 where Triton's interpreter computes."""
        return torch.bfloat16 if self.is_cuda else torch.float32

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    def pick(self, real: int, tiny: int) -> int:
        """Return a size, or a small one for a run on a CPU."""
        return tiny if self.is_tiny else real

    def attempt(self, case: str, work: Callable[[], object]) -> bool:
        """Do it. An error is reported and ends only this. Raises OutOfTime if there is no time left
        to begin; an error that poisons the device is raised again."""
        if self.left_s <= 0:
            self.report.skip(case, "the time is used up")
            raise OutOfTime(case)
        try:
            work()
        except OutOfTime:
            raise
        except Exception as error:
            self.report.fail(case, error)
            if self.is_cuda:
                # Without room nothing after it would work, either.
                torch.cuda.empty_cache()
                torch.cuda.synchronize()
            return False
        return True

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return normal numbers, made on the device."""
        generator = torch.Generator(self.device).manual_seed(self.seed + len(shape))
        made = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return made.normal_(generator=generator)

    def randint(
        self, high: int, *shape: int, dtype: torch.dtype = torch.int64, seed: int = 0
    ) -> torch.Tensor:
        """Return random integers in [0, high)."""
        generator = torch.Generator(self.device).manual_seed(self.seed + seed + 17)
        drawn = torch.randint(high, shape, generator=generator, device=self.device)
        return drawn.to(dtype)

    def time(self, function: Callable[[], object]) -> Timing:
        """Time one call, after some calls that do not count."""
        if not self.is_cuda or self.runs_once:
            return _time_simply(function, 1 if self.runs_once else 2)
        if self._flush is None:
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)
        for _ in range(3):
            function()
        torch.cuda.synchronize()
        try:
            one, many = _captured(function, 1), _captured(function, WARM_COPIES)
        except Exception as error:
            torch.cuda.synchronize()  # raises if the device is lost
            why = f"{type(error).__name__}: {error}".splitlines()[0][:80]
            cold = _median_s(function, self._flush)
            return Timing(cold, _median_s(function, None), "eager", why)
        return Timing(_median_s(one, self._flush), _median_s(many, None) / WARM_COPIES, "graph")


def _captured(function: Callable[[], object], copies: int) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        for _ in range(copies):
            function()
    return graph.replay


def _median_s(call: Callable[[], object], flush: torch.Tensor | None) -> float:
    """Return the median by events. The first repeats determine the number of repeats."""
    times: list[float] = []
    num_repeats = MIN_REPEATS
    while len(times) < num_repeats:
        pairs = []
        for _ in range(num_repeats - len(times)):
            if flush is not None:
                flush.zero_()
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        times += [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
        num_repeats = repeats_for(statistics.median(times))
    return statistics.median(times)


def repeats_for(seconds: float) -> int:
    """Return the number of repeats of a measurement that takes so long."""
    return min(MAX_REPEATS, max(MIN_REPEATS, int(CASE_S / max(seconds, 1e-6))))


def _time_simply(function: Callable[[], object], num_repeats: int) -> Timing:
    """Time calls without events. num_repeats: 1 calls it once, also without a first call."""
    if num_repeats > 1:
        function()
    times = []
    for _ in range(num_repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return Timing(min(times), statistics.mean(times), "cpu")
