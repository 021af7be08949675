"""Half an hour on a GPU: four calls, each under eight minutes, each with an archive of its own.

    make gpu-check PLAN=30min DRY=1          # the four commands, and what they do
    make gpu-check PLAN=30min CALL=1         # one of them; all four in turn without CALL

The tests that have changed since they passed on this kind of device (`benchmarks/gpu/passed.py`)
come first, then right answers, then speeds with predictions. So a lease that ends early has
answered the most important questions. A stage that ends early leaves its
time unused; one that does not is stopped at its budget, and its finished tests and rows stay.
"""

from collections.abc import Iterator
from dataclasses import dataclass

MAX_CALL_S = 480
CHANGED, OTHERS = "changed", "others"


@dataclass(frozen=True)
class Stage:
    """A part of a check. pieces: of a benchmark. only: which files of tests, by whether they have
    changed since they passed."""

    part: str
    budget_s: int
    pieces: str = ""
    only: str = ""

    @property
    def name(self) -> str:
        return f"{self.part}-{self.only}" if self.only else self.part


@dataclass(frozen=True)
class Call:
    """One command on the GPU machine."""

    about: str
    stages: tuple[Stage, ...]

    @property
    def budget_s(self) -> int:
        return sum(stage.budget_s for stage in self.stages)


PLANS = {
    "30min": (
        Call("what has changed since it last passed on such a device, then the other kernels", (
            Stage("kernels", 210, only=CHANGED),
            Stage("models", 110, only=CHANGED),
            Stage("kernels", 50, only=OTHERS),
        )),
        Call("right answers of three models; whole steps by batch, context and prompt", (
            Stage("first", 120),
            Stage("bench", 270, "limits llama-8b qwen3-0.6b"),
        )),
        Call("modes, time line of the host, drafts, 4 and 8 bits, a mixture, each kernel alone", (
            Stage("bench", 450, "limits modes host guesses quantised qwen3-30b-a3b kernels"),
        )),
        Call("attention beside other libraries, other engines, profiler and sanitizer", (
            Stage("bench", 100, "limits attention paged"),
            Stage("peers", 180, "rivals quire-8b generate-8b quire generate"),
            Stage("tools", 140),
        )),
    ),
}  # fmt: skip


def described(name: str) -> Iterator[str]:
    """Yield lines: the commands of a plan, and each one's stages with their budgets."""
    calls = PLANS[name]
    for number, call in enumerate(calls, 1):
        yield f"PLAN={name} CALL={number} bash .ci/gpu-check   # {call.budget_s} s: {call.about}"
        for stage in call.stages:
            yield f"    {stage.budget_s:3d} s  {stage.name:16s} {stage.pieces}".rstrip()
    total_s = sum(call.budget_s for call in calls)
    yield f"together {total_s / 60:.1f} minutes, without starting the machine and its transfers"
