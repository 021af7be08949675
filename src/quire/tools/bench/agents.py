"""Measure a server under sessions of coding agents: reuse, first tokens, time of whole jobs.

    quire bench agents --shape agentx --num-sessions 20 --scale 0.01

Each session sends its turns one after the other; a subagent forks the context of its parent. The
client knows all token ids, so it knows which tokens of each prompt could be reused. These are the
longest beginning that it has sent or received before. The last token of an answer does not count,
since no step computed it. The last token of a prompt does not count either: it must be computed.
`usage` says how many tokens were reused. Two views of the same run:

    server    reuse as a share of what could be reused, time to first token of the turns, memory
    jobs      the time of a session's turns, next to the same turns without other sessions
"""

import argparse
import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from quire.base.errors import ConfigError
from quire.serve.processes.progress import CountBar
from quire.tools.bench.agent_sessions import (
    SHAPES,
    Session,
    Turn,
    draw_sessions,
    read_sessions,
    with_other_names,
)
from quire.tools.bench.bench_request import Asker, make_asker
from quire.tools.bench.datasets import Tokens
from quire.tools.bench.metrics import RequestResult
from quire.tools.bench.serve import make_client, make_tokens, show_errors, wait_until_ready
from quire.tools.http_client import HttpClient, HttpError, first_model
from quire.tools.report import plain_facts, write_report
from quire.tools.workloads import token_ids_of

PIECE = 64  # tokens of a node of `Known`
PERCENTILES = (50, 90, 99)
REUSE = ("num_reusable", "num_reused")
WATCH_S = 0.5  # time between two readings of the server's metrics
DEFAULT_SESSIONS = 20
SETTINGS = ("backend", "shape", "scale", "speed", "seed")
UNNAMED = "last partial block, or no reason given"
INSIDE_A_BLOCK = ("", "new", "diverged")  # reasons of a miss after which no whole block was known
GAUGES = ("kv_cache_usage_perc", "num_requests_running", "process_resident_memory_bytes")


class Known:
    """All token sequences so far, as a tree of pieces, to find the longest known beginning."""

    def __init__(self) -> None:
        self._children: dict[int, dict[bytes, int]] = {0: {}}

    def add(self, tokens: list[int]) -> None:
        """Add a sequence."""
        node, data = 0, np.array(tokens, np.int32).tobytes()
        for i in range(0, len(data), 4 * PIECE):
            children = self._children[node]
            piece = data[i : i + 4 * PIECE]
            if piece not in children:
                children[piece] = len(self._children)
                self._children[children[piece]] = {}
            node = children[piece]

    def num_common(self, tokens: list[int]) -> int:
        """Return the length of the longest beginning that a known sequence has, too."""
        node, data = 0, np.array(tokens, np.int32).tobytes()
        for i in range(0, len(data), 4 * PIECE):
            piece = data[i : i + 4 * PIECE]
            found = self._children[node].get(piece)
            if found is None:
                return i // 4 + max([0, *(_common(piece, each) for each in self._children[node])])
            node = found
        return len(tokens)


def _common(one: bytes, other: bytes) -> int:
    size = min(len(one), len(other)) // 4
    differs = np.frombuffer(one, np.int32)[:size] != np.frombuffer(other, np.int32)[:size]
    return int(differs.argmax()) if differs.any() else size


@dataclass
class TurnResult:
    """Outcome of a turn. job: session without parent to which it belongs. num_reusable: tokens of
    its prompt that could be reused."""

    job: int
    turn: int
    result: RequestResult
    num_reusable: int

    @property
    def num_reused(self) -> int:
        return min(self.result.cached_len, self.num_reusable)

    def as_data(self) -> dict[str, Any]:
        result = self.result
        return {
            "job": self.job,
            "turn": self.turn,
            "start_s": result.start_s,
            "prompt_tokens": result.prompt_len,
            "reusable_tokens": self.num_reusable,
            "cached_tokens": result.cached_len,
            "cached_tokens_by_tier": result.cached_by_tier,
            "miss": result.miss,
            "output_tokens": result.output_len,
            "ttft_s": result.ttft_s,
            "latency_s": result.latency_s,
            "error": result.error,
        }


@dataclass
class Run:
    """Outcomes of a run. peaks: maxima of the server's gauges."""

    turns: list[TurnResult] = field(default_factory=list)
    job_s: dict[int, float] = field(default_factory=dict)  # time of each job, pauses included
    peaks: dict[str, float] = field(default_factory=dict)
    duration_s: float = 0.0

    def turns_s(self, job: int) -> float:
        """Return the time of all turns of a job, without the pauses between them."""
        return sum(each.result.latency_s for each in self.turns if each.job == job)


def contents_of(
    sessions: list[Session], tokens: Tokens, is_chat: bool
) -> list[list[list[int] | str]]:
    """Return what each turn of each session adds to the context: token ids, or a chat's text."""

    def content(turn: Turn) -> list[int] | str:
        if isinstance(turn.new, str):
            return turn.new if is_chat else tokens.encode(turn.new)
        ids = token_ids_of(turn.new, tokens.vocab_size)
        return tokens.decode(ids) if is_chat else ids

    return [[content(turn) for turn in session.turns] for session in sessions]


class Player:
    """Plays sessions against a server. contents: of `contents_of`. speed: factor by which pauses
    are shorter; inf for none."""

    def __init__(
        self,
        asker: Asker,
        sessions: list[Session],
        contents: list[list[list[int] | str]],
        speed: float,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        self._asker, self._sessions, self._contents = asker, sessions, contents
        self._speed, self._done = speed, done
        self._known = Known()
        self._children: dict[tuple[int, int], list[int]] = {}
        for i, each in enumerate(sessions):
            if each.parent is not None:
                self._children.setdefault((each.parent, each.after), []).append(i)
        self.run = Run()

    async def play(self) -> Run:
        """Play all sessions at the times at which they start."""
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for i, session in enumerate(self._sessions):
                if session.parent is None:
                    group.create_task(self._job(i, session.at_s))
        self.run.duration_s = time.perf_counter() - began
        return self.run

    async def play_alone(self, num: int) -> Run:
        """Play the first `num` jobs, one after the other."""
        roots = [i for i, session in enumerate(self._sessions) if session.parent is None]
        for i in roots[:num]:
            await self._job(i, 0.0)
        return self.run

    async def _job(self, i: int, at_s: float) -> None:
        await asyncio.sleep(at_s / self._speed)
        began = time.perf_counter()
        await self._session(i, i, [])
        self.run.job_s[i] = time.perf_counter() - began

    async def _session(self, i: int, job: int, context: list[Any]) -> list[Any]:
        """Play a session that begins with this context. Return its last answer, which is empty if
        a turn failed."""
        answer: list[Any] = []
        for number, turn in enumerate(self._sessions[i].turns):
            await asyncio.sleep(turn.pause_s / self._speed)
            prompt = [] if turn.is_whole else list(context)
            content = self._contents[i][number]
            prompt += [_message("user", content)] if isinstance(content, str) else content
            result = await self._send(job, number, prompt, turn.num_output)
            if not result.is_ok:
                return []
            is_chat = self._asker.is_chat
            answer = [_message("assistant", result.text)] if is_chat else result.token_ids
            context = prompt + answer
            children = self._children.get((i, number), ())
            results = await asyncio.gather(
                *(self._session(child, job, context) for child in children)
            )
            for found in results:  # a parent reads a subagent's answer as a part of its prompt
                context += [each | {"role": "user"} for each in found] if is_chat else found
        return answer

    async def _send(self, job: int, number: int, prompt: list[Any], num: int) -> RequestResult:
        """Send one turn, and count what of its prompt is reused."""
        body: dict[str, Any] = {"return_token_ids": True, "min_tokens": num}
        if self._asker.is_chat:
            body |= {"messages": prompt, "max_completion_tokens": num}
        else:
            body |= {"prompt": prompt, "max_tokens": num}
            num_reusable = self._take(prompt)
        result = await self._asker.send_body(body | self._asker.common, len(prompt))
        if result.is_ok and not (result.prompt_ids and result.token_ids):
            result.error = "the server does not report token ids (return_token_ids)"
        if self._asker.is_chat or not result.is_ok:
            num_reusable = self._take(result.prompt_ids)
        self._known.add([*result.prompt_ids, *result.token_ids[:-1]])
        self.run.turns.append(TurnResult(job, number, result, num_reusable))
        self._done()
        return result

    def _take(self, prompt: list[int]) -> int:
        """Return how many tokens of a prompt were known before it, all but its last at most."""
        num = max(0, min(self._known.num_common(prompt), len(prompt) - 1))
        self._known.add(prompt)
        return num


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


async def watch(client: HttpClient, peaks: dict[str, float]) -> None:
    """Note the maxima of the server's gauges until cancelled."""
    while True:
        with suppress(HttpError, ValueError):
            text = (await client.request("/metrics", timeout_s=10.0)).text
            for family in text_string_to_metric_families(text):
                name = family.name.rpartition(":")[2]
                if name in GAUGES:
                    value = max([0.0, *(sample.value for sample in family.samples)])
                    peaks[name] = max(peaks.get(name, 0.0), value)
        await asyncio.sleep(WATCH_S)


# ---- report ----------------------------------------------------------------------------------


def summary(run: Run, alone: Run) -> dict[str, Any]:
    """Return both views of a run."""
    done = [each for each in run.turns if each.result.is_ok]
    prompts = sum(each.result.prompt_len for each in done)
    outputs = sum(each.result.output_len for each in done)
    reusable, reused = (sum(getattr(each, name) for each in done) for name in REUSE)
    lost, tiers = Counter[str](), Counter[str]()
    by_turn: dict[int, list[float]] = {}
    for each in done:
        by_turn.setdefault(each.turn, []).append(each.result.ttft_s * 1e3)
        tiers.update(each.result.cached_by_tier)
        reason = UNNAMED if each.result.miss in INSIDE_A_BLOCK else each.result.miss
        lost[reason] += each.num_reusable - each.num_reused
    failed = {each.job for each in [*run.turns, *alone.turns] if not each.result.is_ok}
    both = [i for i in alone.job_s if i in run.job_s and i not in failed]
    slower = [run.turns_s(i) / alone.turns_s(i) for i in both if alone.turns_s(i) > 0]
    ttfts = [each.result.ttft_s * 1e3 for each in done]
    return {
        "completed": len(done),
        "failed": len(run.turns) - len(done),
        "duration_s": run.duration_s,
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "input_per_output_token": prompts / max(1, outputs),
        "seen_share": reusable / max(1, prompts),
        "reusable_tokens": reusable,
        "reused_tokens": reused,
        "reuse": reused / reusable if reusable else 1.0,
        "cached_tokens_by_tier": dict(tiers),
        "recomputed_tokens_by_reason": {reason: num for reason, num in lost.items() if num},
        "ttft_ms": _percentiles(ttfts),
        "median_ttft_ms_by_turn": [float(np.median(by_turn[i])) for i in sorted(by_turn)],
        "peaks": run.peaks,
        "job_s": _percentiles(list(run.job_s.values())),
        "turns_s": _percentiles([run.turns_s(i) for i in run.job_s]),
        "times_alone": _percentiles(slower),
        "num_alone": len(slower),
        "turns": [each.as_data() for each in run.turns],
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    found = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return {"mean": float(np.mean(values)), **found, "max": max(values)}


def as_text(found: dict[str, Any], num_sessions: int, num_subagents: int) -> str:
    """Return both views as text."""

    def line(name: str, value: object) -> str:
        return f"{name:<44} {value}"

    def times(name: str, key: str, form: str) -> list[str]:
        kinds = ("mean", "p50", "p99", "max") if found[key] else ()
        return [line(f"{name}, {kind}:", format(found[key][kind], form)) for kind in kinds]

    tiers, lost = found["cached_tokens_by_tier"], found["recomputed_tokens_by_reason"]
    return "\n".join(
        [
            f"{' Agents: the server ':=^60}",
            line("Sessions, and subagents:", f"{num_sessions}, {num_subagents}"),
            line("Turns, and failed ones:", f"{found['completed']}, {found['failed']}"),
            line("Duration (s):", f"{found['duration_s']:.2f}"),
            line("Input tokens per output token:", f"{found['input_per_output_token']:.1f}"),
            line("Share of the input seen before (%):", f"{100 * found['seen_share']:.2f}"),
            line("Reused of it (%):", f"{100 * found['reuse']:.2f}"),
            *[line(f"Cached, {tier}:", num) for tier, num in tiers.items()],
            *[line(f"Recomputed, {reason}:", num) for reason, num in lost.items()],
            *times("Time to first token (ms)", "ttft_ms", ".2f"),
            *[line(f"Peak of {name}:", f"{value:g}") for name, value in found["peaks"].items()],
            f"{' Agents: the jobs ':=^60}",
            *times("Time of a job (s)", "job_s", ".2f"),
            *times("Time of its turns (s)", "turns_s", ".2f"),
            *times(f"Turns, in times of {found['num_alone']} jobs alone", "times_alone", ".2f"),
            "=" * 60,
        ]
    )


# ---- command ---------------------------------------------------------------------------------


def make_sessions(options: argparse.Namespace) -> list[Session]:
    """Return the sessions that the options describe. Raises ConfigError."""
    if options.trace is not None:
        given = options.trace, options.trace_piece, options.output_len, options.num_sessions
        found: list[Session] = read_sessions(*given)
        if not found:
            raise ConfigError(f"the trace {options.trace} holds no session.")
        return found
    shape, num = SHAPES[options.shape], options.num_sessions or DEFAULT_SESSIONS
    return draw_sessions(shape, num, options.scale, options.arrival_s, options.seed)


def run(options: argparse.Namespace) -> int:
    """Run the command and return the exit status: 1 if a turn failed."""
    sessions = make_sessions(options)
    with asyncio.Runner() as runner:
        client = make_client(options)
        runner.run(wait_until_ready(client, options.ready_check_timeout_sec))
        model = options.model or runner.run(first_model(client))
        tokens = make_tokens(options, runner, client, model)
        asker = make_asker(options, client, model)
        contents = contents_of(sessions, tokens, asker.is_chat)
        others = with_other_names(sessions)
        alone = Player(asker, others, contents_of(others, tokens, asker.is_chat), math.inf)
        num_turns = sum(len(each.turns) for each in sessions)
        runner.run(alone.play_alone(options.num_alone))
        with CountBar(num_turns, "Turns", not options.disable_tqdm) as bar:
            crowd = Player(asker, sessions, contents, options.speed, bar.advance)
            runner.run(_watched(client, crowd))
        runner.run(client.close())
    found = summary(crowd.run, alone.run)
    roots = sum(each.parent is None for each in sessions)
    print(as_text(found, roots, len(sessions) - roots), flush=True)
    show_errors([each.result for each in [*alone.run.turns, *crowd.run.turns]])
    settings = settings_of(options)
    counts = {"num_sessions": roots, "num_subagents": len(sessions) - roots}
    write_report(options.output_json, {"model_id": model} | settings | counts | found, plain_facts)
    is_failed = found["failed"] or any(not each.result.is_ok for each in alone.run.turns)
    return 1 if is_failed or not found["completed"] else 0


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that describe the sessions, for the result file."""
    found = {name: getattr(options, name) for name in SETTINGS}
    if math.isinf(options.speed):
        found["speed"] = "inf"  # JSON has no such number
    if options.trace is not None:
        found |= dict.fromkeys(("shape", "scale", "seed")) | {"trace": str(options.trace)}
    return found


async def _watched(client: HttpClient, player: Player) -> None:
    watcher = asyncio.create_task(watch(client, player.run.peaks))
    try:
        await player.play()
    finally:
        watcher.cancel()
