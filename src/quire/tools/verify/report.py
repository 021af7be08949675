"""The result of `quire verify`, as data and as text for a bug report."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.tools.verify.compare import Difference, TokensChosen

WITHIN, DIFFERS = "equal within rounding", "differs"
COLUMNS = (
    "weights",
    "dtype",
    "attention",
    "KV",
    "computed",
    "logits",
    "units",
    "largest",
    "tokens",
)


@dataclass(frozen=True)
class Run:
    """One way to compute the tokens, compared with a reference."""

    weights: str  # storage format of the weights
    dtype: str
    attention: str
    kv: str
    computed: str  # division of the sequence into steps
    reference: str  # the reference
    bound: float  # bound on the relative error
    differences: tuple[Difference, ...] = ()
    tokens: TokensChosen | None = None
    weights_rounding: float | None = None  # relative error of the logits by the format alone
    refusal: str | None = None  # reason why this way is impossible
    # whether rounding may route tokens to other experts; the bound then applies to the median token
    reroutes: bool = False

    @property
    def first(self) -> Difference | None:
        """Return the first point that exceeds the bound."""
        return next((d for d in self.differences if not self._error(d) <= self.bound), None)

    @property
    def is_within(self) -> bool:
        """Return whether rounding explains all differences."""
        tokens = self.tokens
        is_explained = tokens is None or tokens.position is None or tokens.is_tie
        return self.first is None and is_explained

    @property
    def is_rerouted(self) -> bool:
        """Return whether only some tokens exceed the bound."""
        return self.first is None and any(d.relative > self.bound for d in self.differences)

    def _error(self, difference: Difference) -> float:
        return difference.median if self.reroutes else difference.relative

    @property
    def name(self) -> str:
        parts = (self.weights, self.dtype, self.attention, f"KV {self.kv}", self.computed)
        return ", ".join(parts)


@dataclass(frozen=True)
class Report:
    """The result of all comparisons."""

    facts: dict[str, dict[str, Any]]  # machine, versions, model, settings; by section and name
    prompt: list[int]
    tokens: list[int]
    cache_error: float  # relative error of transformers' logits with a cache
    runs: tuple[Run, ...]

    @property
    def failed(self) -> Run | None:
        """Return the first run that differs."""
        return next((run for run in self.runs if not run.is_within), None)

    @property
    def verdict(self) -> str:
        return WITHIN if self.failed is None else DIFFERS


def as_data(report: Report) -> dict[str, Any]:
    """Return a report as JSON data."""
    runs = [
        asdict(run) | {"is_within": run.is_within, "first": run.first and run.first.point}
        for run in report.runs
    ]
    return {
        "verdict": report.verdict,
        **report.facts,
        "prompt": report.prompt,
        "tokens": report.tokens,
        "cache_error": report.cache_error,
        "runs": runs,
    }


def lines(report: Report) -> Iterator[str]:
    """Yield the report's lines."""
    yield _verdict(report)
    for section, facts in report.facts.items():
        yield section
        yield from (f"  {name:18} {_shown(value)}" for name, value in facts.items())
    count, chosen = len(report.prompt), len(report.tokens)
    yield (
        f"{count} prompt tokens, then {chosen} that transformers chooses; its cache alone changes"
        f" its logits by {report.cache_error:.1e}"
    )
    yield from _table([COLUMNS, *(_cells(run) for run in report.runs if run.refusal is None)])
    refused = [run for run in report.runs if run.refusal is not None]
    if refused:
        yield "not computed"
        yield from (f"  {run.name}: {run.refusal}" for run in refused)
    yield from _notes(report)


def _verdict(report: Report) -> str:
    failed = report.failed
    if failed is None:
        return f"{WITHIN}: {sum(run.refusal is None for run in report.runs)} ways to compute"
    if failed.first is None:
        return f"{DIFFERS} from {failed.reference} in the tokens chosen ({failed.name})"
    return f"{DIFFERS} from {failed.reference}, first at {place(failed.first)} ({failed.name})"


def place(difference: Difference) -> str:
    """Return a description of the part of the model in which a difference arises."""
    names = difference.point.split(".")
    if len(names) == 3:
        where = f"layer {names[1]}: attention, or the norm before it"
    elif len(names) == 2:
        where = f"layer {names[1]}: feed-forward layer, or a norm or addition after attention"
    else:
        where = {"embedding": "the embedding", "hidden": "the norm after the last layer"}.get(
            difference.point, "the head"
        )
    position = "" if difference.position is None else f", from token {difference.position}"
    return where + position


def _cells(run: Run) -> list[str]:
    columns = [run.weights, run.dtype, run.attention, run.kv, run.computed]
    mark = "" if run.is_within else " !"
    if not run.differences:
        return [*columns, f"-{mark}", "-", "-", _tokens(run.tokens)]
    logits = run.differences[-1]
    figures = f"{logits.relative:.1e}{mark}", _units(logits.units), f"{logits.largest:.1e}"
    return [*columns, *figures, _tokens(run.tokens)]


def _tokens(tokens: TokensChosen | None) -> str:
    if tokens is None:
        return "-"
    if tokens.position is None:
        return f"{tokens.same} of {tokens.count}"
    kind = "a near tie" if tokens.is_tie else "an error"
    return (
        f"{tokens.same} of {tokens.count}, {kind} at {tokens.position} (margin"
        f" {tokens.margin:.1e}, error {tokens.error:.1e})"
    )


def _notes(report: Report) -> Iterator[str]:
    for run in report.runs:
        if run.weights_rounding is not None:
            yield (
                f"{run.weights}: the format of the weights alone changes the logits by"
                f" {run.weights_rounding:.1%}; the table compares with the same numbers in"
                f" {run.reference.rsplit(' ', 1)[-1]}"
            )
    for run in report.runs:
        if run.is_rerouted:
            last = run.differences[-1]
            yield (
                f"{run.name}: for most tokens the logits differ by at most {last.median:.1e};"
                " rounding sends the other tokens to other experts, which is not an error"
            )
    failed = report.failed
    if failed is None or not failed.differences:
        return
    yield f"point by point: {failed.name}, with {failed.reference}"
    head = ("point", "relative", "units", "largest", "from token")
    rows = [
        [d.point, f"{d.relative:.1e}", _units(d.units), f"{d.largest:.1e}", _position(d)]
        for d in failed.differences
    ]
    yield from _table([head, *rows])


def _position(difference: Difference) -> str:
    return "-" if difference.position is None else str(difference.position)


def _units(units: float) -> str:
    return f"{units:.1f}" if units < 10 else f"{units:.0f}" if units < 1e6 else f"{units:.0e}"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {inner}" for name, inner in value.items())
    return str(value)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield ("  " + "  ".join(cells)).rstrip()
