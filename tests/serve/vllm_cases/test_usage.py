"""Usage in streams"""

from typing import Any

import pytest

from tests.support.serve.vllm_cases import Asked, refused

BOTH = ["complete", "chat"]


def usages(asked: Asked, name: str, **options: Any) -> list[Any]:
    more: dict[str, Any] = {"ignore_eos": True}
    chunks = getattr(asked, name)(stream=True, stream_options=options, **more)
    return [(chunk.choices, chunk.usage) for chunk in chunks]


def adds_up(usage: Any) -> bool:
    return bool(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("options", [{}, {"include_usage": False}])
def test_none(asked: Asked, name: str, options: dict[str, Any]) -> None:
    """a stream tells no usage if none is asked for"""
    assert all(usage is None for _, usage in usages(asked, name, **options))


def test_continuous_alone(asked: Asked) -> None:
    """continuous_usage_stats without include_usage ask for none"""
    found = usages(asked, "complete", include_usage=False, continuous_usage_stats=True)
    assert all(usage is None for _, usage in found)


@pytest.mark.parametrize("name", BOTH)
def test_last(asked: Asked, name: str) -> None:
    """include_usage: a last chunk has it, and no choices"""
    *before, (choices, usage) = usages(asked, name, include_usage=True)
    assert choices == [] and usage.completion_tokens == 5 and adds_up(usage)
    assert all(each is None for _, each in before)


@pytest.mark.parametrize("name", BOTH)
def test_continuous(asked: Asked, name: str) -> None:
    """continuous_usage_stats: every chunk has it, and it grows"""
    found = usages(asked, name, include_usage=True, continuous_usage_stats=True)
    counts = [usage.completion_tokens for _, usage in found]
    assert counts == sorted(counts) and counts[-1] == 5
    assert all(adds_up(usage) for _, usage in found)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("field", ["include_usage", "continuous_usage_stats"])
def test_without_stream(asked: Asked, name: str, field: str) -> None:
    """stream_options without a stream are refused"""
    error = refused(getattr(asked, name), stream_options={field: True})
    assert error["param"] == "stream_options"


def test_cached(asked: Asked) -> None:
    """the details tell how many tokens of a prompt were cached"""
    ids = list(range(50, 150))
    asked.complete(ids)
    details = asked.complete(ids).usage.prompt_tokens_details
    assert 64 <= details.cached_tokens < 100
