"""Sessions of coding agents: turns that append to a growing context, with pauses between them.

A session is drawn from one of two published shapes, or read from a trace. A subagent is a session
that forks the context of its parent after one of the parent's turns. The parent waits for it, and
its result becomes a part of the parent's next prompt.

    codex    610 sessions of Codex on SWE-bench Pro (vLLM and Mooncake, vLLM's blog, 6 May 2026):
             33 turns, contexts of 12,000 to 80,000 tokens, 2,242 more in each turn, 131 input
             tokens per output token, a pause of 5.2 s between turns (99th percentile: 81.4 s)
    agentx   SemiAnalysis' AgentX (vLLM's blog, 8 September 2026; aiperf's scenario `agentx`):
             43 turns of 142,000 input and 444 output tokens on average, more than 96 % of the
             input seen before, subagents in 44 % of the sessions, pauses of at most 300 s

The sources do not say how these numbers vary between sessions, how large the system prompt is, or
what a subagent does. These parts of the shapes are estimates.
"""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.base.errors import ConfigError
from quire.tools.traces import OWN, Trace, read_trace

Part = tuple[int, int]  # name and number of tokens (`workloads.token_ids_of`)
MAX_PAUSE_S = 300.0
PAUSE_SIGMA = 1.18  # of a log-normal: the 99th percentile is 15.6 times the median
SPREAD = 0.1  # relative spread of turns, and of tokens of a turn
SYSTEM = 1  # name of the system prompt, which all sessions share
MAX_SUBAGENTS = 3
OTHERS = {"image", "images", "audio", "audios", "video", "videos"}  # media of aiperf's turns


@dataclass(frozen=True)
class Shape:
    """Means of a session's numbers. first: tokens of the first prompt, of which all sessions share
    `system`. growth: tokens that a turn adds to the context, with the answer before it."""

    num_turns: int
    first: int
    system: int
    growth: int
    num_output: int
    pause_s: float  # median
    subagents: float  # share of sessions with subagents


SHAPES = {
    "codex": Shape(33, 12_000, 8_000, 2_242, 366, 5.2, 0.0),
    "agentx": Shape(43, 40_000, 20_000, 4_860, 444, 5.2, 0.44),
}


@dataclass(frozen=True)
class Turn:
    """One request of a session.

    new: parts of the prompt that follow the context, or a text. num_output: tokens of the answer.
    pause_s: seconds between the end of the turn before it and this request. is_whole: whether
    `new` is the whole prompt, context included.
    """

    new: tuple[Part, ...] | str
    num_output: int
    pause_s: float = 0.0
    is_whole: bool = False


@dataclass(frozen=True)
class Session:
    """Turns of one agent. parent, after: of a subagent, the session that it forks, and the turn
    after which it does. at_s: start of a session without parent."""

    turns: tuple[Turn, ...]
    at_s: float = 0.0
    parent: int | None = None
    after: int = 0


def draw_sessions(
    shape: Shape, num: int, scale: float, arrival_s: float, seed: int
) -> list[Session]:
    """Draw `num` sessions and their subagents. A subagent comes after its parent in the list.

    scale: factor of all numbers of tokens. arrival_s: mean time between the starts of sessions.
    """
    rng, names = np.random.default_rng(seed), itertools.count((seed % 1000 + 1) << 24)
    sessions: list[Session] = []
    starts = np.cumsum(rng.exponential(arrival_s, num)) if arrival_s else np.zeros(num)
    for i, at_s in enumerate((starts - starts[0]).tolist()):
        own = (next(names), _tokens(rng, (shape.first - shape.system) * scale))
        opening = ((SYSTEM, max(1, round(shape.system * scale))), own)
        turns = _turns(shape, scale, _spread(rng, shape.num_turns), opening, rng, names)
        parent = len(sessions)
        sessions.append(Session(turns, at_s))
        # With a fixed number of sessions, exactly this share of them has subagents.
        if int((i + 1) * shape.subagents) > int(i * shape.subagents):
            for _ in range(int(rng.integers(1, MAX_SUBAGENTS + 1))):
                task = ((next(names), _tokens(rng, (shape.growth - shape.num_output) * scale)),)
                own_turns = _turns(shape, scale, int(rng.integers(2, 11)), task, rng, names)
                after = int(rng.integers(0, max(1, len(turns) - 1)))
                sessions.append(Session(own_turns, parent=parent, after=after))
    return sessions


def _turns(
    shape: Shape,
    scale: float,
    num: int,
    opening: tuple[Part, ...],
    rng: np.random.Generator,
    names: Iterator[int],
) -> tuple[Turn, ...]:
    turns = []
    for i in range(num):
        new = opening
        if i:
            new = ((next(names), _tokens(rng, (shape.growth - shape.num_output) * scale)),)
        pause_s = min(MAX_PAUSE_S, float(rng.lognormal(np.log(shape.pause_s), PAUSE_SIGMA)))
        num_output = _tokens(rng, shape.num_output * scale)
        turns.append(Turn(new, num_output, pause_s if i else 0.0))
    return tuple(turns)


def _spread(rng: np.random.Generator, mean: float) -> int:
    return max(1, round(mean * rng.uniform(1 - SPREAD, 1 + SPREAD)))


def _tokens(rng: np.random.Generator, mean: float) -> int:
    """Draw a number of tokens: a gamma of shape 2, at least 1, since tool results vary a lot."""
    return max(1, round(rng.gamma(2.0, mean / 2.0)))


# ---- traces ----------------------------------------------------------------------------------


def read_sessions(path: Path, piece_tokens: int, num_output: int, max_sessions: int | None) -> Any:
    """Read aiperf's multi-turn JSONL, or a trace of Mooncake's format. Raises ConfigError.

    num_output: output tokens of turns without an `output_length`.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            lines = [line for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {path} cannot be read ({error}).") from error
    if lines and '"turns"' in lines[0]:
        sessions = [_aiperf(path, n, line, num_output) for n, line in enumerate(lines, 1)]
        return sessions[:max_sessions]
    trace = read_trace(path, piece_tokens)
    if trace.format != "Mooncake":
        raise ConfigError(
            f"{path} is {trace.format}'s trace, which has no sessions; use Mooncake's JSONL with"
            " session_id, or aiperf's multi-turn JSONL."
        )
    if all(each.follows is None for each in trace.requests):
        raise ConfigError(
            f"{path} has no sessions: no line continues another. Its lines need session_id, and"
            " delay from the second turn of a session on."
        )
    return of_trace(trace)[:max_sessions]


def of_trace(trace: Trace) -> list[Session]:
    """Return the sessions of a trace. Its prompts are whole ones."""
    chains: dict[int, list[int]] = {}
    first_of: dict[int, int] = {}
    for i, each in enumerate(trace.requests):
        first_of[i] = i if each.follows is None else first_of[each.follows]
        chains.setdefault(first_of[i], []).append(i)
    found = []
    for chain in chains.values():
        requests = [trace.requests[i] for i in chain]
        pauses = [0.0, *(each.at_s for each in requests[1:])]
        turns = [
            Turn(each.prompt, each.num_output, pause_s, is_whole=True)
            for each, pause_s in zip(requests, pauses, strict=True)
        ]
        found.append(Session(tuple(turns), requests[0].at_s))
    return sorted(found, key=lambda session: session.at_s)


def _aiperf(path: Path, number: int, line: str, num_output: int) -> Session:
    """Parse one conversation of aiperf's multi-turn format."""
    where = f"{path}, line {number}"
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}, is not valid JSON ({error}).") from error
    turns = item.get("turns") if isinstance(item, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(t, dict) for t in turns):
        raise ConfigError(f"{where}: `turns` must be a list of objects with a `text`.")
    return Session(tuple(_aiperf_turn(where, turn, num_output) for turn in turns))


def _aiperf_turn(where: str, turn: dict[str, Any], num_output: int) -> Turn:
    if found := OTHERS & turn.keys():
        raise ConfigError(f"{where}: turns with {found.pop()} are not supported; remove them.")
    texts = turn.get("texts", [turn.get("text")])
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise ConfigError(f"{where}: each turn needs a `text`, or `texts`, a list of them.")
    delay_ms, length = turn.get("delay") or 0, turn.get("output_length") or num_output
    for name, value, low in (("delay", delay_ms, 0), ("output_length", length, 1)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value < math.inf:
            raise ConfigError(f"{where}: {name} must be a number from {low}, got {value!r}.")
    return Turn("\n".join(texts), int(length), delay_ms / 1e3)


def with_other_names(sessions: list[Session]) -> list[Session]:
    """Return sessions of the same lengths with other tokens, which share nothing with these."""

    def renamed(turn: Turn) -> Turn:
        new = turn.new
        if isinstance(new, str):
            new = "again: " + new
        else:
            new = tuple((name ^ (OWN >> 1), num) for name, num in new)
        return Turn(new, turn.num_output, turn.pause_s, turn.is_whole)

    return [
        Session(tuple(map(renamed, each.turns)), each.at_s, each.parent, each.after)
        for each in sessions
    ]
