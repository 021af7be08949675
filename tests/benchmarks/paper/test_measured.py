"""The measured cases: their requests, and one run on a small model."""

from benchmarks.paper.measured import DEMO, GROUPS, MAX_LEN, PREFIX, Case, cases, measure, requests


def test_each_group_has_cases_to_compare() -> None:
    found = cases(list(GROUPS))
    for group in GROUPS:
        names = [each.name for each in found if each.group == group]
        assert len(names) == len(set(names)) >= 2, group
        drawn = [requests(each, 1000) for each in found if each.group == group]
        assert all(prompts == drawn[0][0] for prompts, _ in drawn), "the same prompts in all cases"
    assert [each.group for each in cases(["prefix"])] == ["prefix", "prefix"]


def test_requests_fit_and_share_their_prefix() -> None:
    for case in cases(list(GROUPS)):
        prompts, params = requests(case, 1000)
        assert len(prompts) == len(params) == case.num, case
        lengths = [len(p) + (each.max_tokens or 0) for p, each in zip(prompts, params, strict=True)]
        assert max(lengths) <= MAX_LEN, case
        assert len({tuple(prompt[: case.prefix]) for prompt in prompts}) == 1, case
    prompts, _ = requests(Case("prefix", "", num=3, prefix=PREFIX), 1000)
    assert len({tuple(prompt) for prompt in prompts}) == 3


def test_samples_share_blocks() -> None:
    alone = measure(Case("samples", "1", num=2), DEMO)
    four = measure(Case("samples", "4", num=2, n=4), DEMO)
    assert alone.saved == 0.0 < four.saved and four.batched > alone.batched


def test_small_pool_preempts() -> None:
    """Recomputing and swapping run with the requests and the pool of the report."""
    for case in cases(["preemption"]):
        assert measure(case, DEMO).num_preemptions >= 5, case
