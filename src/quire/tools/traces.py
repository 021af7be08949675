"""Read published traces of requests, whose format is detected from their content.

    Azure, 2023 and 2024 (CSV)   TIMESTAMP, ContextTokens, GeneratedTokens
    BurstGPT (CSV)               Timestamp, Request tokens, Response tokens
    Mooncake (JSONL)             timestamp [ms], input_length, output_length, hash_ids

The first two only have lengths, so no prompts share a prefix. Mooncake's hash_ids name pieces of
512 tokens: equal ids become equal tokens, so that shared prefixes stay shared. A line with a
session_id and a delay [ms] arrives that long after the answer to its session's previous line.
`recorded.py` reads quire's own recordings.
"""

import csv
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError

PIECE_TOKENS = 512  # tokens per hash id in Mooncake's traces
OWN = 1 << 47  # names of unshared tokens are above this
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURST = ("Timestamp", "Request tokens", "Response tokens")
MOONCAKE = ("timestamp", "input_length", "output_length")
FORMATS = (
    f"Azure's CSV ({', '.join(AZURE)}), BurstGPT's CSV ({', '.join(BURST)}), Mooncake's JSONL"
    f" ({', '.join(MOONCAKE)} and, if prompts share something, hash_ids), and recordings"
    " (`quire serve --record DIR`)"
)


@dataclass(frozen=True)
class TraceRequest:
    """A line of a trace."""

    at_s: float  # seconds since the first line, or since the end of the request `follows`
    prompt: tuple[tuple[int, int], ...]  # (name, number of tokens) of parts (`token_ids_of`)
    num_output: int
    tenant: str = ""
    follows: int | None = None  # index of the request that must end before

    @property
    def num_prompt(self) -> int:
        return sum(count for _, count in self.prompt)


@dataclass(frozen=True)
class Trace:
    """A trace. `num_skipped` counts lines without output, which cannot be simulated."""

    requests: list[TraceRequest]
    format: str
    num_skipped: int = 0


def read_trace(
    path: Path, piece_tokens: int = PIECE_TOKENS, max_requests: int | None = None
) -> Trace:
    """Read a trace, or its first `max_requests` requests, ordered by time.

    Raises ConfigError with the known formats."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = next((line for line in file if line.strip()), "")
            lines = itertools.chain([first], file)
            if first.lstrip().startswith("{"):
                trace = Trace(_mooncake(path, lines, piece_tokens, max_requests), "Mooncake")
            else:
                trace = _table(path, lines, max_requests)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {path} cannot be read ({error}).") from error
    if not trace.requests:
        raise ConfigError(f"the trace {path} holds no request.")
    return _from_zero(trace)


def _from_zero(trace: Trace) -> Trace:
    """Order requests by time, and move the first one to time 0."""
    independent = [each for each in trace.requests if each.follows is None]
    if any(each.follows is not None for each in trace.requests):
        order = trace.requests  # `follows` refers to indices in this order
    else:
        order = sorted(independent, key=lambda each: each.at_s)
    begin_s = min(each.at_s for each in independent)
    moved = [
        each if each.follows is not None else _moved(each, each.at_s - begin_s) for each in order
    ]
    return Trace(moved, trace.format, trace.num_skipped)


def _moved(each: TraceRequest, at_s: float) -> TraceRequest:
    return TraceRequest(at_s, each.prompt, each.num_output, each.tenant, each.follows)


# ---- tables ----------------------------------------------------------------------------------


def _table(path: Path, lines: Iterable[str], max_requests: int | None) -> Trace:
    rows = csv.DictReader(lines, skipinitialspace=True)
    names = {(name or "").strip().lower(): name for name in rows.fieldnames or ()}
    for columns, kind in ((AZURE, "Azure"), (BURST, "BurstGPT")):
        if all(column.lower() in names for column in columns):
            found = [names[column.lower()] for column in columns]
            return _lengths(path, rows, (found[0], found[1], found[2]), kind, max_requests)
    shown = ", ".join(name or "" for name in rows.fieldnames or ())[:120]
    raise ConfigError(
        f"{path} is not a known trace; its first line is {shown!r}. Known are {FORMATS}."
    )


def _lengths(
    path: Path,
    rows: Iterable[dict[str, str]],
    columns: tuple[str, str, str],
    kind: str,
    max_requests: int | None,
) -> Trace:
    found: list[TraceRequest] = []
    num_skipped = 0
    for number, row in enumerate(rows, 2):
        if max_requests is not None and len(found) == max_requests:
            break
        time, num_prompt, num_output = (row.get(column) for column in columns)
        try:
            at_s = _seconds(time or "")
            lengths = int(float(num_prompt or "")), int(float(num_output or ""))
        except (ValueError, OverflowError) as error:
            raise ConfigError(
                f"{path}, line {number}: {columns[0]}={time!r}, {columns[1]}={num_prompt!r} and"
                f" {columns[2]}={num_output!r} must be a time and two whole numbers."
            ) from error
        if min(lengths) < 1:
            num_skipped += 1
            continue
        found.append(TraceRequest(at_s, ((OWN + number, lengths[0]),), lengths[1]))
    return Trace(found, kind, num_skipped)


def _seconds(text: str) -> float:
    """Parse seconds, or a date and time with any number of decimals."""
    try:
        return float(text)
    except ValueError:
        head, point, rest = text.strip().partition(".")
        digits = len(rest) - len(rest.lstrip("0123456789"))
        moment = datetime.fromisoformat(head + point + rest[: min(digits, 6)] + rest[digits:])
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return moment.timestamp()


# ---- Mooncake --------------------------------------------------------------------------------


def _mooncake(
    path: Path, lines: Iterable[str], piece_tokens: int, max_requests: int | None
) -> list[TraceRequest]:
    found: list[TraceRequest] = []
    last_of: dict[str, int] = {}  # session -> index of its last line
    for number, item in _objects(path, lines):
        if max_requests is not None and len(found) == max_requests:
            break
        request = _of_object(path, number, item, piece_tokens)
        session = item.get("session_id")
        follows = None
        if session is not None:
            if item.get("delay") is not None or item.get("timestamp") is None:
                follows = last_of.get(str(session))
            last_of[str(session)] = len(found)
        at_s = _number(path, number, item, "timestamp") / 1e3 if follows is None else 0.0
        if follows is not None and item.get("delay") is not None:
            at_s = _number(path, number, item, "delay") / 1e3
        found.append(TraceRequest(at_s, request.prompt, request.num_output, "", follows))
    if any(each.follows is not None for each in found):
        return found
    return sorted(found, key=lambda each: each.at_s)


def _objects(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}, is not valid JSON ({error}).") from error
        if not isinstance(item, dict):
            raise ConfigError(
                f"{path}, line {number}, is not an object with {', '.join(MOONCAKE)}."
            )
        yield number, item


def _of_object(path: Path, number: int, item: dict[str, Any], piece_tokens: int) -> TraceRequest:
    num_prompt = int(_number(path, number, item, "input_length", "input_tokens"))
    num_output = int(_number(path, number, item, "output_length", "output_tokens"))
    ids = item.get("hash_ids") or []
    if not isinstance(ids, list) or not all(isinstance(each, int) and each >= 0 for each in ids):
        raise ConfigError(f"{path}, line {number}: hash_ids must be a list of whole numbers.")
    if min(num_prompt, num_output) < 1:
        raise ConfigError(f"{path}, line {number}: input_length and output_length must be above 0.")
    parts, left = [], num_prompt
    for each in ids:
        if left <= 0:
            break
        parts.append((each % OWN, min(piece_tokens, left)))
        left -= piece_tokens
    if left > 0:
        parts.append((OWN + number, left))
    return TraceRequest(0.0, tuple(parts), num_output)


def _number(path: Path, number: int, item: dict[str, Any], *names: str) -> float:
    """Return the first of these fields that is a number. Raises ConfigError if there is none."""
    for name in names:
        value = item.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    raise ConfigError(
        f"{path}, line {number}: {names[0]} must be a number, got {item.get(names[0])!r}; a line"
        f" needs {', '.join(MOONCAKE)}."
    )
