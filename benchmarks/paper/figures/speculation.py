"""T 4.4.4: what draft tokens gain, by rows and by acceptance: by formula, at measured rates."""

from benchmarks.paper.bands import order
from benchmarks.paper.figure import Curve, Effort, Figure, Runs
from benchmarks.result_files import newest
from benchmarks.virtual.step_times import LLAMA_8B
from quire.tools.step_times import StepLoad

NUM_DRAFT_TOKENS, CONTEXT = 4, 1000
ROWS = (1, 4, 16, 64, 128, 256, 512)
# Workload and drafter, with the names of `benchmarks.cpu.drafts`.
MEASURED = (("copying", "ngram 4"), ("tools", "eagle3 4"), ("tools", "draft_model 4"))


def chance(workload: str, way: str) -> float:
    """Return the share of accepted draft tokens, measured on the demo model."""
    (found,) = newest("cpu_drafts_demo").where(task=workload, engine="quire bf16", variant=way)
    share: float = found["num_right"] / found["num_tried"]
    return share


def gain(right: float, num_rows: int) -> float:
    """Return tokens per second with drafts, over those without. right: acceptance of each draft."""
    num = NUM_DRAFT_TOKENS + 1
    return expected(right) * step_s(num_rows, 1) / step_s(num_rows, num)


def expected(right: float) -> float:
    """Return the mean number of tokens of a row in a step: those up to a wrong one."""
    return sum(right**index for index in range(NUM_DRAFT_TOKENS + 1))


def step_s(num_rows: int, num_tokens: int) -> float:
    """Return seconds of a step with so many tokens for each row."""
    tokens, context = num_rows * num_tokens, num_rows * CONTEXT
    load = StepLoad(tokens, context, tokens * CONTEXT, tokens)
    return LLAMA_8B.seconds_of(lambda window: load)


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make the figure."""
    chances = {f"{way} on {workload}": chance(workload, way) for workload, way in MEASURED}
    curves = [
        Curve(
            f"{name}: {right:.0%} accepted",
            list(map(float, ROWS)),
            [gain(right, num) for num in ROWS],
        )
        for name, right in chances.items()
    ]
    best = max(chances.values())
    one, longest = gain(best, 1), expected(best)
    findings = [
        order("gain with 1 row, the best of these", one, 0.9 * longest, 1.001 * longest, "",
              "a tenth below the tokens of a step: one row waits for the weights"),
        order("gain with 512 rows, the best of these", gain(best, 512),
              longest / (1 + NUM_DRAFT_TOKENS), one / 2, "",
              "below half of the gain with 1 row: arithmetic is the limit"),
    ]  # fmt: skip
    text = (
        f"{NUM_DRAFT_TOKENS} draft tokens in each step, for Llama-3.1-8B on an H200 with contexts"
        " of"
        f" {CONTEXT:,} tokens, without the cost of drafting. The acceptance rates come from the"
        " demo model (`benchmarks/cpu/drafts.py`). With many rows arithmetic is the limit, and"
        " drafts gain little or nothing. The engine measures this and drafts less"
        " (`engine/drafting/draft_pace.py`)."
        " [Draft tokens](models.md#draft-tokens-for-repeated-text) has gains measured on CPUs."
    )
    return [
        Figure(
            "speculation",
            "Gain from draft tokens",
            "T 4.4.4",
            "rows",
            "tokens per second over those without drafts",
            curves,
            findings,
            text,
            is_log_x=True,
        )
    ]
