"""Decode context parallelism: ranks that divide the tokens of sequences, against one rank.

Covers `ops/attention/context_shared.py`.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.ops.collectives.thread_group import run_ranks
from quire.ops.host.native import core
from tests.support.models.checkpoints import write_checkpoint
from tests.support.models.ranks import logits_of

# (variant, ranks, ranks that share a context). All but llama_multi_query have two KV heads.
VARIANTS = [
    ("llama", 4, 2),
    ("qwen2_windows", 4, 2),
    ("gpt_oss", 4, 2),
    ("gemma2", 4, 2),
    ("mixtral", 4, 2),
    ("qwen3_next", 4, 2),
    ("mistral_window", 4, 2),
    ("llama_multi_query", 4, 2),
    ("llama_multi_query", 4, 4),
    ("llama_multi_query", 2, 2),
]
SLOW_VARIANTS = ("mixtral", "mistral_window")


@pytest.mark.parametrize(
    ("variant", "size", "sharing", "backend"),
    [
        pytest.param(
            *case,
            backend,
            marks=[] if number % 2 == b and case[0] not in SLOW_VARIANTS else pytest.mark.slow,
        )
        for number, case in enumerate(VARIANTS)
        for b, backend in enumerate(("reference", "torch"))
    ],
)
def test_ranks_that_share_contexts_match_one_rank(
    variant: str, size: int, sharing: int, backend: str, tmp_path: Path
) -> None:
    spec = write_checkpoint(tmp_path, variant).spec
    (wanted,) = run_ranks(1, lambda group: logits_of(tmp_path, spec, group))
    work = partial(logits_of, tmp_path, spec, sharing=sharing, backend=backend)
    for found in run_ranks(size, work):
        for one_TV, other_TV in zip(wanted, found, strict=True):
            torch.testing.assert_close(other_TV, one_TV, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(core() is None, reason="the C++ core was not built")
@pytest.mark.parametrize(
    ("variant", "paging"),
    [
        pytest.param("gpt_oss", {}, marks=pytest.mark.slow),
        ("qwen3_next", {}),
        ("gpt_oss", {"kv_format": "int8"}),
        ("llama_multi_query", {"block_size": 16}),
        pytest.param("llama_multi_query", {}, marks=pytest.mark.slow),
        pytest.param("qwen3_next", {"kv_format": "int8"}, marks=pytest.mark.slow),
        pytest.param("llama_multi_query", {"kv_format": "int8"}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {"block_size": 16}, marks=pytest.mark.slow),
        pytest.param("qwen3_next", {"block_size": 16}, marks=pytest.mark.slow),
    ],
)
def test_core_logits_match_ranks_that_do_not_share(
    variant: str, paging: dict[str, Any], tmp_path: Path
) -> None:
    spec = write_checkpoint(tmp_path, variant).spec
    given = {"backend": "cpu", **paging}
    wanted, *_ = run_ranks(
        4, lambda group: logits_of(tmp_path, spec, group, torch.float32, **given)
    )
    found, *_ = run_ranks(
        4, lambda group: logits_of(tmp_path, spec, group, torch.float32, sharing=2, **given)
    )
    for one_TV, other_TV in zip(wanted, found, strict=True):
        torch.testing.assert_close(other_TV, one_TV, rtol=1e-4, atol=1e-5)
