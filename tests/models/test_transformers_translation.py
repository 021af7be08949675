"""transformers' classes are translated into quire's operations correctly, or not at all.

Covers `models/hf/lower.py`, `models/hf/follow.py`, `models/hf/terms.py`, `models/hf/recognise.py`,
`models/hf/arrange.py`, `models/hf/merge.py`, `models/hf/steps.py`.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quire.base.errors import ConfigError
from quire.models.hf import lower
from quire.models.hf.arrange import Arrangement
from quire.models.hf.lower import Lowering
from quire.models.hf.modules import NamedLinear
from quire.models.hf.recognise import Norm, norm_of
from quire.models.hf.steps import Steps
from quire.models.hf.terms import Unfollowed
from quire.models.load.cache_files import WeightCache
from quire.models.load.loading import LoadOptions, load_model
from quire.models.registry import model_spec
from quire.ops.attention.select import make_backend
from quire.ops.host.native import core
from quire.ops.registry import record_ops
from quire.spec.model_spec import load_spec
from tests.support.cases import slow_but
from tests.support.models.checkpoints import VARIANTS, random_tokens
from tests.support.models.paged_forward import CPU, RowPart, make_layout, make_step, run_paged
from tests.support.models.transformers_checkpoints import FAMILIES, TRANSLATED, write_reference

SEQUENCES = random_tokens(23, 5, 31, 1)
CHUNKS = [[7, 0, 9, 1, 1, 5], [0, 3, 1, 1], [13, 11, 1, 1, 1, 4], [0, 0, 1]]
CASES = VARIANTS | FAMILIES
UNTRANSLATED = {
    "qwen2_moe": "Cannot copy out of meta tensor",
    "gpt2": "Cannot copy out of meta tensor",
    "gpt_oss": "attention has sinks",
    "stablelm": "results of several layers are read side by side",
}


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
@pytest.mark.parametrize("name", slow_but(TRANSLATED, "glm4", "starcoder2", "cohere2"))
def test_a_translated_model_is_one_program_of_the_core(name: str, tmp_path: Path) -> None:
    reference = write_reference(tmp_path, *CASES[name])
    model = load_model(tmp_path, reference.spec, torch.float32, CPU)
    got = run_paged(model, reference.spec, SEQUENCES, CHUNKS, backend="cpu", native=True)
    for tokens, logits_TV in zip(SEQUENCES, got, strict=True):
        wanted_TV = reference.logits(tokens).float()
        torch.testing.assert_close(logits_TV, wanted_TV, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    "name", slow_but(("qwen3_tied", "phi3", "olmo2", "smollm3", "gemma3"), "phi3", "gemma3")
)
def test_a_translated_model_has_the_operations_of_quires_class(name: str, tmp_path: Path) -> None:
    reference = write_reference(tmp_path, *CASES[name])
    attention = make_backend("torch", make_layout(reference.spec, 8, 4))
    tables = tuple([0, 1, 2] for _ in reference.spec.cache_groups)
    step = make_step([RowPart(0, 9, tables)], 4)
    ids = torch.tensor(random_tokens(9)[0])
    found = []
    for spec in (reference.spec, load_spec(tmp_path)):
        model = load_model(tmp_path, spec, torch.float32, CPU)
        with torch.inference_mode(), record_ops() as record:
            attention.prepare(step)
            model.logits(model(ids, step.positions_T, attention))
        found.append(sorted(record.names))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", slow_but(UNTRANSLATED, "gpt_oss", "stablelm"))
def test_models_without_a_translation_run_by_their_own_code(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = CASES[name][1] | ({"qk_layernorm": True} if name == "stablelm" else {})
    reference = write_reference(tmp_path, CASES[name][0], config)
    with caplog.at_level(logging.INFO, "quire"):
        model = load_model(tmp_path, reference.spec, torch.float32, CPU)
    assert UNTRANSLATED[name] in caplog.text
    assert not model.only_operations
    assert f"of transformers, its own code: {UNTRANSLATED[name]}" in model.runs_by
    assert not [m for m in model.modules() if isinstance(m, Steps)]
    got = run_paged(model, reference.spec, SEQUENCES[:1], [[20, 3]], backend="torch")
    wanted_TV = reference.logits(SEQUENCES[0]).float()
    torch.testing.assert_close(got[0], wanted_TV, rtol=2e-4, atol=2e-4)


def test_a_wrong_translation_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A translation is checked before it is used."""
    original = lower.rotation

    def inverted_rotation(*args: Any) -> Any:
        found = original(*args)
        return dataclasses.replace(found, frequencies=-found.frequencies)

    monkeypatch.setattr(lower, "rotation", inverted_rotation)
    reference = write_reference(tmp_path, *CASES["gpt_neox"])
    with caplog.at_level(logging.INFO, "quire"):
        model = load_model(tmp_path, reference.spec, torch.float32, CPU)
    assert "would be called with other numbers" in caplog.text
    layers = [m for m in model.modules() if isinstance(m, NamedLinear)]
    assert layers and all(rows.taken()[1] is None for m in layers for rows in m._rows)
    got = run_paged(model, reference.spec, SEQUENCES[:1], [[20, 3]], backend="torch")
    wanted_TV = reference.logits(SEQUENCES[0]).float()
    torch.testing.assert_close(got[0], wanted_TV, rtol=2e-4, atol=2e-4)


def test_embeddings_may_replace_token_ids(tmp_path: Path) -> None:
    reference = write_reference(tmp_path, *CASES["gemma2"])
    model = load_model(tmp_path, reference.spec, torch.float32, CPU)
    attention = make_backend("torch", make_layout(reference.spec, 8, 4))
    step = make_step([RowPart(0, 9, ([0, 1, 2], [0, 1, 2]))], 4)
    ids = torch.tensor(random_tokens(9)[0])
    with torch.inference_mode():
        attention.prepare(step)
        wanted = model(ids, step.positions_T, attention)
        embeds = model.get_submodule("base.embed_tokens")(ids)
        got = model(torch.zeros_like(ids), step.positions_T, attention, embeds)
    torch.testing.assert_close(got, wanted)


@pytest.mark.slow
def test_torch_compiles_a_class_as_one_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """quire's layers and attention are operators of that graph. No code is generated here."""
    compiled = functools.partial(torch.compile, backend="eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", compiled)
    write_reference(tmp_path, "gemma2", CASES["gemma2"][1] | {"num_hidden_layers": 2})
    spec = model_spec(tmp_path, "transformers", is_compiled=True)
    plain = model_spec(tmp_path, "transformers")
    assert spec.identity != plain.identity
    model, wanted = (load_model(tmp_path, each, torch.float32, CPU) for each in (spec, plain))
    chunks = [[5, 7], [3, 2]]
    sequences = [SEQUENCES[0][:12], SEQUENCES[1]]
    got, wanted = (
        run_paged(each, spec, sequences, chunks, backend="torch") for each in (model, wanted)
    )
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)


def test_torch_compile_is_refused_for_quires_classes(tmp_path: Path) -> None:
    write_reference(tmp_path, *CASES["llama"])
    with pytest.raises(ConfigError, match="torch_compile needs a model that runs by a class of tr"):
        model_spec(tmp_path, is_compiled=True)


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
@pytest.mark.parametrize("name", ["gpt_neox", "mixtral"])
def test_packed_weights_come_from_the_cache(name: str, tmp_path: Path) -> None:
    reference = write_reference(tmp_path / "model", *CASES[name])
    options = LoadOptions(cache=WeightCache(tmp_path / "cache", min_bytes=0))
    got = []
    for _ in range(2):
        model = load_model(tmp_path / "model", reference.spec, torch.float32, CPU, options)
        got.append(run_paged(model, reference.spec, SEQUENCES[:1], [[20, 3]], backend="cpu")[0])
        assert len(list((tmp_path / "cache").glob("*"))) == 1
    assert torch.equal(*got)


# ---- supported code between layers -----------------------------------------------------------


def arranged(
    compute: Callable[[Lowering, torch.Tensor, torch.Tensor], torch.Tensor],
) -> Arrangement:
    """Translate a function of the first layer's result [1, T, 8] and the positions [1, T]."""
    lowering = Lowering()

    def run(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return compute(lowering, lowering.embedding(nn.Identity(), ids, 8), positions)

    last = lowering.follow(run)
    return Arrangement(lowering.calls, lowering.buffers, last)


def names(arrangement: Arrangement) -> list[str]:
    return [step.name for step in arrangement.steps(CPU).steps]


def test_operations_are_recognised() -> None:
    def norm(lowering: Lowering, x: torch.Tensor) -> torch.Tensor:
        return lowering.layer(nn.Identity(), x, 8, linear=False)

    def gated(_: Lowering, x: torch.Tensor, __: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return up * nn.functional.gelu(gate, approximate="tanh")

    def summed(lowering: Lowering, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return x + 0.5 * norm(lowering, x) - norm(lowering, x) / 4

    assert names(arranged(gated)) == ["embedding", "gelu_tanh gate"]
    assert names(arranged(summed)) == [
        "embedding", "layer", "scale", "add", "layer", "scale", "add",
    ]  # fmt: skip
    assert names(arranged(lambda _, x, __: x.view(1, -1, 2, 4).flatten(2))) == ["embedding"]


REFUSED: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "square": (lambda _, x, __: x * x, "multiplied with each other"),
    "other_tokens": (lambda _, x, __: x.flip(1), "tokens are mixed"),
    "sum_of_tokens": (lambda _, x, __: x.cumsum(1), "no operation for aten.cumsum"),
    "in_place": (lambda _, x, __: x.mul_(2.0), "no operation for aten.mul_"),
    "values": (lambda _, x, __: x * float(x.sum()), "looks at values"),
    "positions": (lambda _, x, p: x * p[..., None], "a sum of something else"),
    "half_a_turn": (lambda _, x, p: x * p[..., None].cos(), "a sum of something else"),
    "other_sines": (lambda _, x, p: (x * p[..., None]).sin(), "sines of something other"),
    "no_such_gate": (lambda _, x, __: nn.functional.silu(x), "no operation for silu"),
    "ids": (lambda low, x, _: low.embedding(nn.Identity(), low.ids + 1, 8), "other than the token"),
    "order": (lambda _, x, __: x.flip(2), "other than a linear layer are read in another order"),
    "two_at_once": (
        lambda low, x, _: torch.cat((x, low.layer(nn.Identity(), x, 8, linear=False)), -1),
        "read side by side",
    ),
    "uneven": (
        lambda _, x, __: x * torch.arange(8.0),
        "scaled by different numbers|mixed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_code_without_an_operation_is_refused(case: str) -> None:
    compute, reason = REFUSED[case]
    with pytest.raises(Unfollowed, match=reason):
        arranged(compute)


def test_norms_are_recognised_by_their_results() -> None:
    class OddNorm(nn.Module):
        """Scales by 1 + w, with an eps of an unusual name."""

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.small = nn.Parameter(torch.zeros(12)), 3e-4

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled: torch.Tensor = x * (x.pow(2).mean(-1, keepdim=True) + self.small).rsqrt()
            return scaled * (1.0 + self.weight)

    class OtherNorm(OddNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 1.001

    assert norm_of(OddNorm()) == Norm(True, 12, 3e-4, 1.0, ("weight",))
    assert norm_of(nn.LayerNorm(12)) == Norm(False, 12, 1e-5, 0.0, ("weight", "bias"))
    assert norm_of(nn.LayerNorm(12, elementwise_affine=False)) == Norm(False, 12, 1e-5, 0.0, ())
    assert norm_of(OtherNorm()) is None
    assert norm_of(nn.GroupNorm(2, 12)) is None
    assert norm_of(nn.Linear(3, 3)) is None
