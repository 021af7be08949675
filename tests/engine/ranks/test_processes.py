"""Ranks that die, hang or spin cause an error in time, and no process remains.

Covers `engine/ranks/processes.py`.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire.engine.observability.heartbeat
from quire import LLM, SamplingParams
from quire.base.errors import (
    ConfigError,
    EngineError,
    ModelError,
    OutOfMemory,
    RankLost,
    RequestError,
)
from quire.base.messages import Request
from quire.base.settings.config import EngineConfig, config_from_flat
from quire.engine.ranks.launch import Ranks
from quire.models.checkpoint.source import resolve_model
from tests.support.engine.scenarios import COMMON, WORDS
from tests.support.models.reference_checkpoints import checkpoint
from tests.support.processes.servers import children_of, is_running, kill, wait_until

SOON_S = 2.0
LONG = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
ONE: dict[str, Any] = {"distributed_executor_backend": "mp"}
TWO: dict[str, Any] = {"tensor_parallel_size": 2}
END_MESSAGES = {signal.SIGKILL: "signal 9", signal.SIGSTOP: "SIGSTOP"}


def config(**settings: Any) -> EngineConfig:
    return config_from_flat(model=str(checkpoint("llama")), **(COMMON | settings))


def ranks_of() -> list[int]:
    """Return the rank processes of this process."""
    found = children_of(os.getpid())
    return sorted(pid for pid, command in found.items() if "rank_main" in command)


@pytest.fixture(autouse=True)
def no_rank_remains() -> Iterator[None]:
    assert not ranks_of()
    yield
    wait_until(lambda: not ranks_of(), "all ranks have ended")


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_rank_lost_while_loading_is_an_error(rank: int, number: int) -> None:
    made = config(**TWO)
    ranks = Ranks(made)
    pid = ranks_of()[rank]
    kill(pid, number)
    began = time.monotonic()
    with pytest.raises(RankLost, match=END_MESSAGES[number]) as raised:
        ranks.load(made, resolve_model(made.model.model), None)
    assert time.monotonic() - began < SOON_S
    assert f"rank {rank} of 2 (process {pid})" in str(raised.value)
    assert not ranks_of()


@pytest.mark.parametrize(
    ("is_idle", "rank", "number"),
    [
        (True, 1, signal.SIGKILL),
        (False, 0, signal.SIGKILL),
        (False, 1, signal.SIGSTOP),
        pytest.param(True, 0, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(False, 1, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(False, 0, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_rank_lost_at_rest_or_in_a_step_stops_the_engine(
    is_idle: bool, rank: int, number: int
) -> None:
    with LLM(str(checkpoint("llama")), **(COMMON | TWO)) as llm:
        core, pids = llm.engine.client.core, ranks_of()
        if not is_idle:
            next(llm.stream(WORDS, LONG))
            core.add(Request("r", WORDS, LONG, seed=1))
            core.plan()
            assert core.num_in_flight == 1
        kill(pids[rank], number)
        began = time.monotonic()
        if is_idle:
            wait_until(lambda: core.rest_s() == 0.0, "the loss is detected", SOON_S)
        with pytest.raises(EngineError, match=END_MESSAGES[number]):
            core.step()
        assert time.monotonic() - began < SOON_S
        assert f"rank {rank} of 2 (process {pids[rank]})" in str(core._death)
        with pytest.raises(EngineError, match="the engine has stopped"):
            llm.generate(WORDS, GREEDY, use_tqdm=False)
    assert not any(map(is_running, pids))


SPIN = """
import ctypes, signal, sys

def spin(number, frame):
    while True:
        pass

def hang(number, frame):
    ctypes.PyDLL(None).pause()  # holds Python's lock forever

if "quire.engine.ranks.rank_main" in sys.orig_argv:
    signal.signal(signal.SIGUSR1, spin)
    signal.signal(signal.SIGUSR2, hang)
"""


@pytest.mark.parametrize(
    ("rank", "number", "place"),
    [
        (1, signal.SIGUSR1, r"sitecustomize.py:\d+ \(spin\)"),
        (0, signal.SIGUSR2, r"it was in step \d+, after"),
    ],
)
def test_stuck_rank_is_distinguished_from_waiting_ones(
    rank: int, number: int, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SPIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(quire.engine.observability.heartbeat, "MIN_LIMIT_S", 2.0)
    with LLM(str(checkpoint("llama")), **(COMMON | TWO)) as llm:
        core, pids = llm.engine.client.core, ranks_of()
        next(llm.stream(WORDS, LONG))
        core.add(Request("r", WORDS, LONG, seed=1))
        last_beats = core.executor.steps._stragglers._last_beats
        # Otherwise the rank may still be sending its result, and then sends nothing else.
        wait_until(lambda: last_beats[rank].beat.number >= 0, "the rank has reported its step")
        kill(pids[rank], number)
        core.plan()
        began = time.monotonic()
        with pytest.raises(EngineError, match=f"rank {rank} of 2 .process {pids[rank]}. is stuck"):
            core.step()
        assert 1.6 < time.monotonic() - began < 30.0
        message = str(core._death)
        assert re.search(r"step \d+ did not finish within \d+\.\d s", message)
        assert re.search(place, message)
        with pytest.raises(EngineError, match="the engine has stopped"):
            llm.generate(WORDS, GREEDY, use_tqdm=False)
    assert not any(map(is_running, pids))


@pytest.mark.slow
def test_briefly_stopped_rank_continues_and_rejects_functions(
    executed_ranks: None,
) -> None:
    with LLM(str(checkpoint("llama")), **COMMON, **ONE) as llm:
        [pid] = ranks_of()
        kill(pid, signal.SIGSTOP)
        kill(pid, signal.SIGCONT)
        assert llm.generate(WORDS, GREEDY, use_tqdm=False)
        params = SamplingParams(logits_processors=[lambda ids, logits: logits])
        with pytest.raises(RequestError, match="function cannot be sent to an engine in another"):
            llm.generate(WORDS, params, use_tqdm=False)


def test_deleted_engine_ends_its_ranks() -> None:
    llm = LLM(str(checkpoint("llama")), **COMMON, **ONE)
    assert ranks_of()
    del llm


def test_loading_errors_of_a_rank_are_raised_in_the_engine(tmp_path: Any) -> None:
    with pytest.raises(OutOfMemory, match="less than one sequence"):
        LLM(str(checkpoint("llama")), **COMMON, **ONE, kv_cache_memory_bytes=1000)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no model_type"):
        LLM(str(tmp_path), **COMMON, **ONE)
    with pytest.raises(ConfigError, match="tensor_parallel_size=3 does not divide num_attention"):
        LLM(str(checkpoint("llama")), **COMMON, tensor_parallel_size=3)
