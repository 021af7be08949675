"""Choose which models of a long list `make test` runs; mark the others as slow."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.support.models.checkpoints import VARIANTS

# One model of each way in which layers differ: experts, states, windows, chunks, sinks, latent
# vectors, and how tensors are stored. The other types differ in sizes, biases, norms and names.
KINDS = (
    "llama", "gpt2", "gemma3", "llama4", "qwen2_moe", "gpt_oss", "deepseek_v3", "qwen3_next",
)  # fmt: skip


def one_of_each_kind(*more: str) -> list[Any]:
    """Return the variants; all are slow but one of each kind of layer. more: further quick ones."""
    quick = {*KINDS, *more}
    return [pytest.param(n, marks=[] if n in quick else pytest.mark.slow) for n in VARIANTS]


def slow_if_large(shapes: Iterable[str]) -> list[Any]:
    """The names of shapes; tens of thousands of tensors take seconds, if only to be counted."""
    large = ("qwen3-next-80b-a3b", "qwen3-30b-a3b")
    return [pytest.param(name, marks=pytest.mark.slow if name in large else []) for name in shapes]


def first_of_each_type() -> set[str]:
    """The variants that stand for their types."""
    return set({kind: name for name, (kind, _) in reversed(VARIANTS.items())}.values())


def one_of_each_type() -> list[Any]:
    """The variants, of which the second and further ones of a type are slow."""
    stand = first_of_each_type()
    return [pytest.param(n, marks=[] if n in stand else pytest.mark.slow) for n in VARIANTS]


def variants_with(formats: Sequence[Any]) -> list[Any]:
    """Pairs of variant and format: a variant of each kind with one format in turn, the first with
    all; the other pairs are slow."""
    quick = {(name, v % len(formats)) for v, name in enumerate(KINDS)}
    quick |= {(KINDS[0], i) for i in range(len(formats))}
    return [
        pytest.param(name, each, marks=[] if (name, i) in quick else pytest.mark.slow)
        for name in VARIANTS
        for i, each in enumerate(formats)
    ]
