"""Runs of a tiny model with a bit of everything in them, recorded."""

from pathlib import Path
from typing import Any

import numpy as np

from quire.base.clock import FakeClock
from quire.base.messages import Abort, Request
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.config import flat_settings
from quire.engine.attachments.recorder import Recorder
from quire.engine.recording.files import read_recording
from quire.tools.replay import Outcome, replay_all
from tests.support.engine.failing_core import Bench, prompt
from tests.support.engine.updates import run_to_end
from tests.support.models.reference_checkpoints import checkpoint, pool_bytes

MAX_BYTES = 50_000_000
SALT = "salt of a tenant"
STOP = "stop string"
STOPS = tuple(range(30, 35))  # so many that some output ends with one


def replayed(path: Path) -> Outcome:
    """Replay a recording; all of its plans must come out the same."""
    outcome = replay_all(read_recording(path))
    assert outcome.difference is None, "\n".join(outcome.difference.lines())
    return outcome


def begin_segment(recorder: Recorder) -> None:
    """Let a recorder begin a segment, with a snapshot, before the next call."""
    recorder._writer.needs_segment = True


class Run:
    """A bench with a recorder. Time passes by a millisecond per step.

    The pool has room for one sequence of the greatest length and a bit more.
    """

    def __init__(
        self,
        directory: Path,
        keeps_tokens: bool = False,
        max_bytes: int = MAX_BYTES,
        num_blocks: int = 20,
        **settings: Any,
    ) -> None:
        folder = checkpoint("llama")
        defaults = {
            "kv_cache_memory_bytes": pool_bytes(folder, num_blocks, 4),
            "max_num_seqs": 6,
            "max_num_batched_tokens": 24,
            "watermark": 0.0,
            "preemption_mode": "recompute",
        }
        self.bench = Bench(folder, **(defaults | settings))
        self.bench.runner.raises = lambda plan: False
        self.core = self.bench.core
        scheduler = self.core.scheduler
        made_from = flat_settings(self.bench.config)
        self.recorder = Recorder(scheduler, directory, max_bytes, keeps_tokens, made_from)
        self.core.attach(self.recorder)
        self.requests: list[Request] = []

    @property
    def clock(self) -> FakeClock:
        clock = self.core._clock
        assert isinstance(clock, FakeClock)
        return clock

    def ask(
        self, name: str, tokens: list[int], num: int = 8, stops: tuple[int, ...] = (), **params: Any
    ) -> None:
        own = {"priority": 0, "tenant": "", "timeout_s": 0.0}
        more = {key: params.pop(key, default) for key, default in own.items()}
        made = SamplingParams(**({"temperature": 0.7, "max_tokens": num} | params))
        request = Request(
            name, tokens, made, seed=len(self.requests), stop_token_ids=stops,
            eos_token_ids=stops[:1], cache_salt=SALT if len(self.requests) % 2 else "", **more,
        )  # fmt: skip
        self.core.add(request)
        self.requests.append(request)
        for kept in (self.bench.tokens, self.bench.history):
            kept[name] = []

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock.advance(0.001)
            if self.core.has_work:
                self.core.step()

    def finish(self) -> None:
        run_to_end(self.core, self.step)
        self.core.close()

    def everything(self) -> None:
        """n, best_of, beams, prefix hits, stop ids, logprobs, priorities, aborts, time limits; and
        so much at once that some must give way."""
        shared = prompt(1, 21)
        rng = np.random.default_rng(5)
        for i in range(5):
            self.ask(f"long {i}", prompt(40 + i, 5), 26, stops=STOPS if i > 2 else ())
        self.step(30)
        self.ask("too late", prompt(50, 8), 30, timeout_s=0.004)
        for i in range(3):
            self.ask(f"shared {i}", shared + prompt(10 + i, 4), 12, STOPS, stop=[STOP])
        self.ask("three", prompt(2, 9), 10, n=3)
        self.step(3)
        self.ask("beams", prompt(3, 7), 8, STOPS[:3], use_beam_search=True, n=3, temperature=0)
        self.ask("first", prompt(4, 11), 12, STOPS, priority=-1)
        self.ask("logprobs", prompt(5, 10), 6, logprobs=3, prompt_logprobs=2)
        self.step(4)
        self.ask("aborted", prompt(6, 30), 20)
        self.ask("best", prompt(7, 12), 9, STOPS, n=1, best_of=2, tenant="somebody")
        self.step(5)
        self.core.control(Abort("aborted"))
        self.core.control(Abort("three", "stop", 1))
        for i in range(8):
            tokens = (shared if i % 2 else []) + prompt(20 + i, int(rng.integers(1, 30)))
            self.ask(f"late {i}", tokens, int(rng.integers(1, 20)), STOPS, tenant=f"tenant {i % 2}")
            self.step(2)
        self.finish()
