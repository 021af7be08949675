"""Rows of results, each with its limit and the achieved share of it; JSON and Markdown.

A piece writes its file again after each row, so that the results survive any end.
"""

import json
import math
import os
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.floors import H200, Cost, Limits

HEAD = ("case", "result", "limit", "share", "measured limit", "share", "aim", "reached", "more")


@dataclass(frozen=True)
class Row:
    """One result.

    seconds: None if the result is not a time (`figure` holds it).
    floor_s: by the limits that the aims are based on.
    measured_floor_s: by the limits measured on this machine.
    aim: in words.
    is_reached: None without an aim.
    """

    case: str
    seconds: float | None = None
    floor_s: float | None = None
    measured_floor_s: float | None = None
    figure: str = ""
    aim: str = ""
    is_reached: bool | None = None
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def share(self) -> float | None:
        """Of the limit, 1 being all that there is."""
        return _share(self.floor_s, self.seconds)

    @property
    def measured_share(self) -> float | None:
        return _share(self.measured_floor_s, self.seconds)

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table, in the order of HEAD."""
        reached = {None: "", True: "yes", False: "**no**"}[self.is_reached]
        return (
            self.case,
            self.figure or duration(self.seconds),
            duration(self.floor_s),
            percent(self.share),
            duration(self.measured_floor_s),
            percent(self.measured_share),
            self.aim,
            reached,
            ", ".join(f"{name} {value}" for name, value in self.detail.items()),
        )


def timed_row(
    case: str,
    seconds: float,
    cost: Cost,
    measured: Limits | None,
    *,
    aim_s: float | None = None,
    min_share: float | None = None,
    detail: Mapping[str, Any] | None = None,
) -> Row:
    """Return a row with a time and its floors.

    aim_s: the maximum time.
    min_share: the minimum share of the measured limit (of H200's if nothing was measured).
    """
    floor_s = cost.lower_bound_s(H200)
    measured_s = cost.lower_bound_s(measured) if measured else None
    aim, is_reached = "", None
    if aim_s is not None:
        aim, is_reached = f"<= {duration(aim_s)}", seconds <= aim_s
    if min_share is not None:
        aim = f">= {percent(min_share)}"
        is_reached = (measured_s or floor_s) / seconds >= min_share
    rates = {"GB/s": round(cost.all_bytes / seconds / 1e9, 1)}
    if cost.all_flops:
        rates["TFLOP/s"] = round(cost.all_flops / seconds / 1e12, 2)
    found = rates | dict(detail or {})
    return Row(case, seconds, floor_s, measured_s, "", aim, is_reached, found)


def duration(seconds: float | None) -> str:
    if seconds is None or math.isnan(seconds):
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0"


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _share(floor_s: float | None, seconds: float | None) -> float | None:
    return None if not floor_s or not seconds else floor_s / seconds


@dataclass
class Report:
    """The results of a piece. path: its JSON file."""

    piece: str
    path: Path
    rows: list[Row] = field(default_factory=list)
    errors: list[dict[str, str]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print("  " + " | ".join(cell for cell in row.cells() if cell), flush=True)
        self.write()

    def fail(self, case: str, error: BaseException) -> None:
        """Note an error, which ends its case, not the piece."""
        text = "".join(traceback.format_exception(error))
        self.errors.append({"case": case, "traceback": text})
        print(f"  FAILED {case}\n{text}", flush=True)
        self.write()

    def skip(self, case: str, why: str) -> None:
        self.skipped.append(f"{case}: {why}")
        print(f"  skipped {case}: {why}", flush=True)
        self.write()

    def write(self) -> None:
        """Write the report at once, so that a reader never sees half of it."""
        found = asdict(self) | {"path": str(self.path)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, self.path)


def read_piece(path: Path) -> dict[str, Any] | None:
    """Return a piece's report; None if there is none, or only a part."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    return found


def markdown(title: str, facts: Mapping[str, Any], pieces: Iterable[Mapping[str, Any]]) -> str:
    """Return the document of a part: one table for each piece."""
    lines = [f"# {title}", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += ["Limits: " + H200.name + "; beside it those measured here.", ""]
    for piece in pieces:
        lines += [f"## {piece['piece']}", ""]
        rows = [Row(**row).cells() for row in piece["rows"]]
        if rows:
            lines += ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
            lines += ["| " + " | ".join(_plain(cell) for cell in row) + " |" for row in rows]
            lines.append("")
        lines += [f"- skipped {item}" for item in piece["skipped"]]
        lines += [f"- **failed** {last_line(error)}" for error in piece["errors"]]
        lines.append("")
    return "\n".join(lines)


def summary(pieces: Sequence[Mapping[str, Any]], with_all: bool = False) -> list[str]:
    """Return the most important lines: each piece's time and counts, then the aims, missed ones
    last, and skipped or failed cases. with_all: rows without an aim, too."""
    lines, aims = [], []
    for piece in pieces:
        rows, errors, skipped = (piece[name] for name in ("rows", "errors", "skipped"))
        counts = f"{len(rows)} rows, {len(errors)} failed, {len(skipped)} skipped"
        lines.append(f"{piece['piece']:16s} {piece['seconds'].get('process', 0):6.1f} s, {counts}")
        for row in (Row(**row) for row in rows):
            if row.is_reached is not None:
                figure = f"{row.figure or duration(row.seconds)}, aim {row.aim}{_expected(row)}"
                aims.append((row.is_reached, f"{piece['piece']}: {row.case}: {figure}"))
            elif with_all:
                lines.append(f"found    {piece['piece']}: {_in_words(row)}")
    lines += [f"reached  {text}" for is_reached, text in aims if is_reached]
    lines += [f"MISSED   {text}" for is_reached, text in aims if not is_reached]
    for piece in pieces:
        lines += [f"skipped  {piece['piece']}: {item}"[:160] for item in piece["skipped"]]
    for piece in pieces:
        lines += [
            f"FAILED   {piece['piece']}: {last_line(error)}"[:160] for error in piece["errors"]
        ]
    return lines


def _in_words(row: Row) -> str:
    """Return a row in one line, with the share of the least time that it reached."""
    shares = ((row.measured_share, "measured here"), (row.share, H200.name))
    share, of = next((pair for pair in shares if pair[0] is not None), (None, ""))
    unfinished = f", {percent(share)} of what the limits allow ({of})" if share is not None else ""
    rate = f", {row.detail['tokens/s']} tokens/s" if "tokens/s" in row.detail else ""
    return f"{row.case}: {row.figure or duration(row.seconds)}{rate}{unfinished}{_expected(row)}"


def _expected(row: Row) -> str:
    return f", predicted {row.detail['predicted']}" if "predicted" in row.detail else ""


def last_line(error: Mapping[str, str]) -> str:
    """Return the case and its exception."""
    return f"{error['case']}: {error['traceback'].strip().splitlines()[-1]}"


def _plain(cell: str) -> str:
    return cell.replace("|", "/").replace("\n", " ")
