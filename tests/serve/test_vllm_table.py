"""The table in docs/results/vllm-cases.md shows the current cases of vLLM's behaviour."""

from tests.serve.vllm_cases.table import PAGE, page, topics_of_cases


def test_page_is_up_to_date() -> None:
    text = PAGE.read_text("utf-8")
    assert page(text) == text, "run `make migrating`"


def test_every_case_has_a_one_line_description() -> None:
    topics = list(topics_of_cases())
    cases = [case for topic in topics for case in topic.cases]
    names = [(topic.title, case.what) for topic in topics for case in topic.cases]
    assert len(cases) >= 150 and len(set(names)) == len(names)
    for case in cases:
        assert "|" not in case.what + case.difference and len(case.what) < 120, case
        assert not case.what.startswith("test_"), "a case has a docstring"
