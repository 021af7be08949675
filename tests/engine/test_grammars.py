"""Requests with a grammar: each gets what a matcher of its own allows, whatever the engine does."""

import pytest

from tests.engine.guided import GuidedBench, lark

JSON = lark('%json {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}')
WORDS = lark("/[a-d]{3,20}/")
NUMBERS = lark("/[0-9]+(,[0-9]+)*/")
WAYS = [(1, False), (1, True), (2, True), (3, True)]


@pytest.mark.parametrize(("depth", "is_threaded"), WAYS)
def test_answers_are_a_matchers_own(depth: int, is_threaded: bool) -> None:
    bench = GuidedBench(depth, is_threaded)
    for i, grammar in enumerate([JSON, WORDS, NUMBERS, JSON, WORDS, WORDS]):
        bench.add(str(i), grammar, 5 + i, max_tokens=25)
    bench.add("three", NUMBERS, n=3, max_tokens=12)
    bench.finish()
    bench.assert_exact()
    assert bench.num_made == 1
    bench.core.close()
