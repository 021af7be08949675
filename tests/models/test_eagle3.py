"""EAGLE-3 heads compared with their definition, and heads that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.base.errors import ModelError
from quire.models.eagle3 import Eagle3
from quire.models.load.loading import LoadOptions, load_model
from quire.models.model import Model
from quire.models.parts.layers import Embedding, ParamFactory
from quire.ops.attention.select import make_backend
from quire.runner.drafting.drafting import NativeHead
from quire.spec.eagle3_spec import head_options, head_spec
from quire.spec.model_spec import ModelSpec
from tests.support.models.checkpoints import random_tokens
from tests.support.models.draft_heads import (
    AUTHORS,
    LAYER,
    SPECULATORS,
    HeadByDefinition,
    HeadShape,
    run_by_definition,
    target_spec,
    write_head,
)
from tests.support.models.paged_forward import CPU, RowPart, make_layout, make_step

TOKENS = random_tokens(18)[0]
NUM_FURTHER = 4
QWEN3 = {"model_type": "qwen3", "head_dim": 16}
SHAPES = {
    "authors": HeadShape(),
    "speculators": HeadShape(SPECULATORS, norm_first=True),
    "all_ids": HeadShape(num_ids=97, layer={"attention_bias": True}),
    "own_embedding": HeadShape(SPECULATORS, has_embedding=True, target_size=24),
    "two_layers": HeadShape(SPECULATORS, layer={"num_hidden_layers": 2}, reads=(0, 7)),
    "norm_before_fc": HeadShape(SPECULATORS, top={"norm_before_fc": True}),
    "more_norms": HeadShape(SPECULATORS, top={"fc_norm": True, "norm_output": True}),
    "qwen3": HeadShape(SPECULATORS, layer=QWEN3, reads=(1, 2, 3, 4)),
}


class Target(Model):
    """A target model that has only an embedding."""

    def __init__(self, table: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = Embedding("embed_tokens", *table.shape, ParamFactory(dtype, CPU))
        self.embedding.weight.copy_(table)


def draft(
    head: Any, spec: ModelSpec, read_TF: torch.Tensor, backend_name: str, cuts: list[int]
) -> tuple[list[int], list[torch.Tensor]]:
    """Draft as run_by_definition does. cuts: the number of known tokens in each step."""
    layout = make_layout(spec, 12, 4, head.dtype)
    backend = make_backend(backend_name, layout)
    run = NativeHead(head, backend) if backend_name == "cpu" else head
    blocks, done = tuple([5, 0, 9, 2, 7, 1, 3] for _ in spec.cache_groups), 0

    def prepared(start: int, end: int) -> torch.Tensor:
        step = make_step([RowPart(start, end, blocks)], 4)
        backend.prepare(step)
        return step.positions_T

    for count in cuts:
        ids = torch.tensor(TOKENS[done + 1 : done + 1 + count])
        read = read_TF[done : done + count].to(head.dtype)
        positions = prepared(done, done + count)
        out = run.first(ids, positions, read, backend)[-1:]
        done += count
    found = [run.logits(out)[0]]
    drafts = [int(found[0].argmax())]
    for i in range(NUM_FURTHER):
        positions = prepared(done + i, done + i + 1)
        out = run.further(torch.tensor(drafts[-1:]), positions, out, backend)
        found.append(run.logits(out)[0])
        drafts.append(int(found[-1].argmax()))
    return drafts, found


@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_drafts_match_the_definition(name: str, tmp_path: Path) -> None:
    """Compares the logits of each draft: in float64, in float32 over several steps, and in the
    core's program."""
    shape = SHAPES[name]
    weights = write_head(tmp_path, shape)
    target = target_spec(hidden_size=shape.target_size)
    spec = head_spec(tmp_path, target)
    torch.manual_seed(1)
    table = torch.randn(shape.vocab, LAYER["hidden_size"])
    read_TF = torch.randn(len(TOKENS) - 1, len(head_options(spec).reads) * shape.target_size)
    wanted = run_by_definition(
        HeadByDefinition(shape, weights, table), TOKENS, read_TF, NUM_FURTHER
    )
    for backend, dtype, cuts, limit in (
        ("reference", torch.float64, [17], 1e-10),
        ("torch", torch.float32, [9, 1, 7], 1e-3),
        ("cpu", torch.float32, [1, 12, 4], 1e-3),
    ):
        head = load_model(tmp_path, spec, dtype, CPU)
        assert isinstance(head, Eagle3)
        head.attach(Target(table, dtype))
        drafts, found = draft(head, spec, read_TF, backend, cuts)
        assert drafts == wanted[0]
        for each, logits in zip(found, wanted[1], strict=True):
            torch.testing.assert_close(each.double(), logits, rtol=limit, atol=limit)


@torch.inference_mode()
def test_both_checkpoint_layouts_give_the_same_logits(tmp_path: Path) -> None:
    table, found = torch.randn(97, 32), []
    for layout in (AUTHORS, SPECULATORS):
        shape = HeadShape(layout, reads=(1, 3, 5))
        write_head(tmp_path / layout, shape)
        spec = head_spec(tmp_path / layout, target_spec())
        head = load_model(tmp_path / layout, spec, torch.float32, CPU)
        assert isinstance(head, Eagle3)
        head.attach(Target(table, torch.float32))
        torch.manual_seed(3)
        found.append(draft(head, spec, torch.randn(17, 96), "torch", [17])[1])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    shape = HeadShape(SPECULATORS)
    (tmp_path / "config.json").write_text(json.dumps(shape.config))
    spec = head_spec(tmp_path, target_spec())
    head = load_model(tmp_path, spec, torch.float32, CPU, LoadOptions("dummy"))
    assert isinstance(head, Eagle3)
    head.attach(Target(torch.zeros(97, 32), torch.float32))
    assert head.logits(torch.ones(2, head.num_out)).isfinite().sum() == 2 * shape.num_ids


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"fc.weight": None}, "lack fc.weight"),
        ({"mask_hidden": torch.zeros(3)}, "hold unknown tensors .mask_hidden"),
        ({"fc.weight": torch.zeros(32, 64)}, r"fc.weight has the shape \[32, 64\]"),
        ({"d2t": torch.zeros(41)}, "d2t holds F32"),
        ({"d2t": None}, "proposes 41 of 97 tokens, but its weight files have no d2t"),
        ({"d2t": torch.full((41,), 90)}, "is invalid"),
    ],
)
def test_invalid_weights_are_refused(
    changed: dict[str, torch.Tensor | None], error: str, tmp_path: Path
) -> None:
    write_head(tmp_path, HeadShape(), **changed)
    spec = head_spec(tmp_path, target_spec())
    with pytest.raises(ModelError, match=error):
        head = load_model(tmp_path, spec, torch.float32, CPU)
        assert isinstance(head, Eagle3)
        head.attach(Target(torch.zeros(97, 32), torch.float32))


def test_a_target_embedding_of_another_width_is_refused(tmp_path: Path) -> None:
    write_head(tmp_path, HeadShape(target_size=24))
    head = load_model(
        tmp_path, head_spec(tmp_path, target_spec(hidden_size=24)), torch.float32, CPU
    )
    assert isinstance(head, Eagle3)
    with pytest.raises(ModelError, match="no embed_tokens, and this model's is not 32 wide"):
        head.attach(Target(torch.zeros(97, 24), torch.float32))
