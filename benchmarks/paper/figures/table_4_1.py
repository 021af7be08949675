"""T table 4.1: what each optimisation does to the two counters, and where that is tested."""

from benchmarks.paper.figure import Effort, Figure, Runs

TEST = "`tests/scheduler/test_table_4_1.py`"
ROWS = (
    ("Prefill, decode", "a step of the prompt's length, then of 1", "test_prefill_and_decode"),
    ("Chunked prefill", "steps below the prompt's length", "test_chunked_prefill"),
    ("Preemption", "computed returns to 0, or the blocks go to host memory",
     "test_preemption_by_recomputation, test_preemption_by_swapping"),
    ("Prefix caching", "computed starts at the number of cached tokens", "test_prefix_caching"),
    ("Streaming prefill", "total grows while the prompt arrives", "test_streaming_prefill"),
    ("Speculative decoding", "both grow by the accepted draft tokens, plus one",
     "test_a_draft_is_verified"),
    ("Prefill disaggregation", "computed starts after the blocks of the other engine",
     "test_a_prefilled_request_is_handed_over"),
)  # fmt: skip


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make the table."""
    lines = ["| | what happens to the two counters | test |", "|---|---|---|"]
    lines += [f"| {name} | {effect} | {test} |" for name, effect, test in ROWS]
    text = "\n".join([f"Tests in {TEST}.", "", *lines])
    return [Figure("table_4_1", "Two counters", "T 4.4, table 4.1", text=text)]
