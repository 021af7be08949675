"""Rotary embeddings that are interleaved or partial, through an order of rows. Also longrope, with
separate factors for long lengths.

Covers `spec/rope_options.py`.
"""

import json
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.models.load.loading import load_model
from quire.models.parts.rope import head_order, rope_frequencies, rows_of_heads
from quire.ops.rotary import rotary, rotary_rows
from quire.spec.config_fields import Fields
from quire.spec.model_spec import load_spec
from quire.spec.rope_options import RopeOptions, rope_options
from tests.support.models.checkpoints import exact_logits, random_tokens, write_checkpoint
from tests.support.models.paged_forward import CPU, run_paged


def rotated_by_pairs(
    x_TNH: torch.Tensor, angles_TE: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Rotate by complex numbers, in the checkpoint's own order of dimensions."""
    out, half = x_TNH.clone(), angles_TE.shape[1]
    for e in range(half):
        i, j = (2 * e, 2 * e + 1) if interleaved else (e, e + half)
        points = torch.complex(x_TNH[..., i], x_TNH[..., j])
        points = points * torch.exp(1j * angles_TE[:, None, e])
        out[..., i], out[..., j] = points.real, points.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [12, 8, 2])
def test_dot_products_match_rotated_pairs(rotated: int, interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 7, 3, 12, generator=generator, dtype=torch.float64)
    options = RopeOptions("default", 100.0, rotated, scale=1.0)
    frequencies = rope_frequencies(options, 12)
    assert (frequencies > 0).sum() == rotated // 2
    positions = torch.arange(7)
    angles_TE = positions[:, None] * frequencies[: rotated // 2]
    wanted_q, wanted_k = (rotated_by_pairs(each, angles_TE, interleaved) for each in (q, k))
    order = head_order(12, rotated, interleaved=interleaved)
    assert (order is None) == (rotated == 12 and not interleaved)
    order = torch.arange(12) if order is None else order
    rows = rotary_rows(positions, frequencies, 1.0, torch.float64)
    got_q, got_k = rotary(q[..., order], rows), rotary(k[..., order], rows)
    wanted = torch.einsum("snh,tnh->nst", wanted_q, wanted_k)
    torch.testing.assert_close(torch.einsum("snh,tnh->nst", got_q, got_k), wanted)
    assert rows_of_heads(order, 2).tolist() == [*order.tolist(), *(12 + order).tolist()]


def test_dimensions_without_rotation_are_not_scaled() -> None:
    frequencies = rope_frequencies(RopeOptions("default", 100.0, 4), 8)
    x = torch.ones(1, 1, 8, dtype=torch.float64)
    got = rotary(x, rotary_rows(torch.zeros(1, dtype=torch.int64), frequencies, 3.0, x.dtype))
    assert got.flatten().tolist() == [3.0, 3.0, 1.0, 1.0, 3.0, 3.0, 1.0, 1.0]


def test_partial_rotary_factor_sets_the_rotated_dimensions() -> None:
    assert rope_options(Fields({}), 64, 128, default_part=0.25).rotated == 16
    inner = Fields({"rope_parameters": {"partial_rotary_factor": 0.5}})
    assert rope_options(inner, 64, 128, default_part=0.25).rotated == 32


# ---- longrope: one choice per engine ---------------------------------------------------------


@pytest.fixture(scope="module")
def long_and_short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a phi3 that was trained with 24 tokens, and extends to 128."""
    folder: Path = tmp_path_factory.mktemp("phi3") / "model"
    write_checkpoint(folder, "phi3_long")
    path = folder / "config.json"
    changes = {"original_max_position_embeddings": 24}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def served_logits(folder: Path, served: int | None, tokens: list[int]) -> torch.Tensor:
    spec = load_spec(folder).served_up_to(served)
    model = load_model(folder, spec, torch.float64, CPU)
    return run_paged(model, spec, [tokens], [[len(tokens)]], dtype=torch.float64)[0]


@pytest.mark.parametrize(("served", "as_far_as"), [(24, 24), (25, 40), (None, 40), (-1, 40)])
def test_the_served_length_chooses_the_factors(
    long_and_short: Path, served: int | None, as_far_as: int
) -> None:
    """transformers chooses by the length of each prompt. An engine uses one choice for all prompts,
    so short ones differ from transformers where long ones are served."""
    tokens, short = random_tokens(as_far_as, 16)
    wanted, wanted_short = exact_logits(long_and_short, [tokens, short])
    torch.testing.assert_close(
        served_logits(long_and_short, served, tokens), wanted, rtol=1e-10, atol=1e-10
    )
    got = served_logits(long_and_short, served, short)
    assert torch.allclose(got, wanted_short, rtol=1e-10, atol=1e-10) == (as_far_as == 24)


def test_the_choice_of_factors_changes_the_identity(long_and_short: Path) -> None:
    """A persistent cache must not mix keys of both choices. Lengths on one side of the limit share
    an identity."""
    spec = load_spec(long_and_short)
    short, edge, beyond = (spec.served_up_to(length) for length in (9, 24, 25))
    assert short.identity == edge.identity != beyond.identity == spec.identity


@pytest.mark.parametrize(("served", "is_long"), [(24, False), (40, True), (None, True)])
def test_max_model_len_chooses_the_factors_of_an_engine(
    long_and_short: Path, served: int | None, is_long: bool
) -> None:
    tokens = random_tokens(20)[0]
    settings = {"max_model_len": served, "dtype": "float64", "attention_backend": "torch"}
    with LLM(str(long_and_short), disable_log_stats=True, **settings) as llm:
        assert llm.engine.spec.is_long == is_long
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        (output,) = llm.generate([tokens], params, use_tqdm=False)
    known = tokens.copy()
    for _ in range(4):
        known.append(int(served_logits(long_and_short, served, known)[-1].argmax()))
    assert output.outputs[0].token_ids == known[20:]
