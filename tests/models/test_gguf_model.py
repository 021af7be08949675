"""A checkpoint written as a GGUF file is the same model."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.base.errors import ModelError
from quire.base.gguf import GGUFFile
from quire.base.model_spec import ModelSpec, load_spec
from quire.models.gguf.weights import gguf_tensors
from quire.models.loading import load_model
from quire.models.source import resolve_model
from tests.models.checkpoints import VARIANTS, Checkpoint, random_tokens, write_checkpoint
from tests.models.gguf_writer import (
    BF16,
    F16,
    F32,
    Q4_0,
    Q8_0,
    Tensor,
    convert,
    stored,
    write_gguf,
)
from tests.models.paged import CPU, run_paged

CONVERTIBLE = [
    "llama",
    "llama_tied",
    "llama_biases",
    "llama_multi_query",
    "llama3_rope",
    "linear_rope",
    "yarn_rope",
    "qwen2",
    "qwen3",
    "qwen3_tied",
    "mistral",
    "mistral_window",
    "gpt2",
]
SEQUENCES = random_tokens(23, 5, 61, 1)
WHOLE = [[23], [5], [61], [1]]
# Of the spec: what a GGUF file does not say, or says otherwise.
LOOSE = {"model_type", "dtype", "raw", "bos_token_id", "eos_token_ids"}


@pytest.fixture(scope="module", params=CONVERTIBLE)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def logits(model: torch.nn.Module, spec: ModelSpec, dtype: torch.dtype) -> list[torch.Tensor]:
    return run_paged(model, spec, SEQUENCES, WHOLE, backend="reference", dtype=dtype)


def test_all_of_our_architectures_that_llama_cpp_knows_are_tried() -> None:
    left_out = {name for name in VARIANTS if name not in CONVERTIBLE}
    assert left_out == {"opt", "opt_350m", "opt_plain", "gpt2_scaled", "qwen2_windows"}


def test_spec(checkpoint: Checkpoint, tmp_path: Path) -> None:
    spec = load_spec(convert(checkpoint.directory, tmp_path / "model.gguf"))
    for name in vars(spec).keys() - LOOSE:
        assert getattr(spec, name) == getattr(checkpoint.spec, name), name
    assert spec.dtype == "float32"


def test_float32_gives_the_same_logits(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """In float64, in which it is computed with the very numbers of the file."""
    path = convert(checkpoint.directory, tmp_path / "model.gguf")
    spec = load_spec(path)
    wanted = load_model(checkpoint.directory, checkpoint.spec, torch.float64, CPU)
    got = load_model(path, spec, torch.float64, CPU)
    pairs = zip(
        logits(got, spec, torch.float64),
        logits(wanted, checkpoint.spec, torch.float64),
        strict=True,
    )
    # The file has its norms' epsilon, and llama3's divisors, in float32.
    limit = 1e-5 if spec.raw.get("rope_parameters", {}).get("divisors") else 1e-8
    for got_TV, wanted_TV in pairs:
        torch.testing.assert_close(got_TV, wanted_TV, rtol=limit, atol=limit)


@pytest.mark.parametrize(
    ("kind", "limit"), [(F16, 0.01), (BF16, 0.05), (Q8_0, 0.05), (Q4_0, 0.6)], ids=str
)
@pytest.mark.parametrize("variant", ["llama", "gpt2"])
def test_smaller_kinds_give_close_logits(
    tmp_path: Path, variant: str, kind: int, limit: float
) -> None:
    """limit: on the mean error, as a share of the logits' standard deviation."""
    checkpoint = write_checkpoint(tmp_path / variant, variant)
    path = convert(checkpoint.directory, tmp_path / "model.gguf", kind)
    spec = load_spec(path)
    assert spec.dtype == ("float16" if kind == F16 else "bfloat16")
    got = logits(load_model(path, spec, torch.float32, CPU), spec, torch.float32)
    errors, sizes = [], []
    for tokens, got_TV in zip(SEQUENCES, got, strict=True):
        wanted_TV = checkpoint.logits(tokens)
        errors.append((got_TV - wanted_TV).abs().mean().item())
        sizes.append(wanted_TV.std().item())
    assert 0 < np.mean(errors) < limit * np.mean(sizes)


def test_parameters_are_the_dequantised_values(llama: Checkpoint, tmp_path: Path) -> None:
    """Rows of queries and keys come in our order, in bfloat16 as in float32."""
    path = convert(llama.directory, tmp_path / "model.gguf", BF16)
    spec = load_spec(path)
    wanted = load_model(llama.directory, llama.spec, torch.bfloat16, CPU)
    got = load_model(path, spec, torch.bfloat16, CPU)
    x = torch.eye(32, dtype=torch.bfloat16)
    for one, other in zip(got.layers, wanted.layers, strict=True):
        assert torch.equal(one.attention.qkv(x), other.attention.qkv(x))
    assert torch.equal(got.embedding.weight, wanted.embedding.weight)


def test_large_matrices_are_filled_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: Checkpoint
) -> None:
    path = convert(llama.directory, tmp_path / "model.gguf", Q8_0)
    spec = load_spec(path)
    whole = logits(load_model(path, spec, torch.float32, CPU), spec, torch.float32)
    monkeypatch.setattr("quire.models.gguf.weights.VALUES_AT_ONCE", 100)
    parts = logits(load_model(path, spec, torch.float32, CPU), spec, torch.float32)
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a, b)


def test_blocks_come_in_our_order_of_rows(llama: Checkpoint, tmp_path: Path) -> None:
    """What a kernel would get that takes Q8_0 as it is."""
    file = GGUFFile(convert(llama.directory, tmp_path / "model.gguf", Q8_0))
    spec = load_spec(file.path)
    wanted = llama.model.get_parameter("model.layers.1.self_attn.k_proj.weight").detach().numpy()
    (k,) = [
        t for t in gguf_tensors(file, spec) if t.name.endswith("layers.1.self_attn.k_proj.weight")
    ]
    assert k.kind.name == "Q8_0"
    assert k.blocks(3, 11).tobytes() == stored(wanted, Q8_0).data[3 * 34 : 11 * 34]


def test_progress_ends_with_all(llama: Checkpoint, tmp_path: Path) -> None:
    path = convert(llama.directory, tmp_path / "model.gguf", Q8_0)
    seen: list[tuple[int, int]] = []
    load_model(path, load_spec(path), torch.float32, CPU, progress=lambda *at: seen.append(at))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 0


def test_source(llama: Checkpoint, tmp_path: Path) -> None:
    path = convert(llama.directory, tmp_path / "tiny-Q8_0.gguf", Q8_0)
    source = resolve_model(str(path))
    assert (source.directory, source.load_format, source.name) == (path, "auto", "tiny-Q8_0")
    with pytest.raises(ModelError, match="no config.json; to load tiny-Q8_0.gguf, give the path"):
        load_spec(tmp_path)


# ---- errors ----------------------------------------------------------------------------------

META: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 8,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
EMBEDDING = {"token_embd.weight": stored(np.zeros((4, 8)), F32)}
NAN = float("nan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "mamba"}, "'mamba'; GGUF files are read of llama, qwen2, qwen3"),
        ({"general.architecture": 3}, "general.architecture must be a text"),
        ({"split.count": 3}, "one of 3 parts of a model; join them"),
        ({"llama.expert_count": 8}, "a mixture of experts"),
        ({"llama.block_count": 0}, "llama.block_count is 0"),
        ({"llama.block_count": 1 << 30}, r"blk.1.attn_q.weight is missing"),
        ({"llama.feed_forward_length": 1 << 30}, r"ffn_up.weight has the shape \[8, 8\], but"),
        ({"llama.embedding_length": 1 << 30}, r"attn_q.weight has the shape \[8, 8\], but"),
        ({"llama.attention.head_count": [2, 3]}, "head_count must be a whole number, not an array"),
        ({"llama.attention.head_count_kv": 3}, "2 query heads of 4 dimensions, and 3 KV heads"),
        ({"llama.attention.value_length": 3}, "value_length is 3, but heads have 4"),
        ({"llama.rope.dimension_count": 2}, "dimension_count is 2, but heads have 4"),
        (
            {"llama.rope.scaling.type": "longrope"},
            "'longrope'.* supported are none, linear and yarn",
        ),
        ({"llama.attention.layer_norm_rms_epsilon": NAN}, "epsilon is nan"),
        ({"llama.context_length": "long"}, "context_length must be a whole number"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id must be a whole number"),
    ],
)
def test_metadata_that_is_not_supported(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    tensors = {name: stored(values, F32) for name, values in complete().items()}
    with pytest.raises(ModelError, match=message):
        load_spec(write_gguf(tmp_path / "model.gguf", META | change, tensors))


def test_no_language_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tensor token_embd\.weight"):
        load_spec(write_gguf(tmp_path / "model.gguf", META))


def test_divisors_of_another_size(tmp_path: Path) -> None:
    tensors = EMBEDDING | {"rope_freqs.weight": stored(np.ones(5), F32)}
    with pytest.raises(ModelError, match=r"rope_freqs\.weight has the shape \[5\]"):
        load_spec(write_gguf(tmp_path / "model.gguf", META, tensors))
    tensors["rope_freqs.weight"] = stored(np.array([1.0, 0.0]), F32)
    with pytest.raises(ModelError, match="numbers that are not above 0"):
        load_spec(write_gguf(tmp_path / "model.gguf", META, tensors))


def load(path: Path) -> torch.nn.Module:
    return load_model(path, load_spec(path), torch.float32, CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blk.0.attn_sinks.weight": np.ones(2)}, r"unknown tensors \(blk.0.attn_sinks.weight\)"),
        ({"output_norm.weight": np.ones(9)}, r"model.norm.weight has the shape \[9\].* \[8\]"),
        ({"blk.0.attn_k.weight": np.ones((6, 8))}, r"k_proj.weight has the shape \[6, 8\]"),
        ({"blk.0.attn_q.weight": np.ones((6, 8))}, r"attn_q.weight has the shape \[6, 8\]"),
        ({"blk.0.ffn_gate.weight": np.ones((8, 8, 1))}, r"has the shape \[8, 8, 1\]"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    tensors = {name: stored(values, F32) for name, values in complete().items()}
    load(write_gguf(tmp_path / "good.gguf", META, tensors))
    tensors |= {name: stored(values, F32) for name, values in change.items()}
    with pytest.raises(ModelError, match=message):
        load(write_gguf(tmp_path / "bad.gguf", META, tensors))


def test_tensors_that_are_missing(tmp_path: Path) -> None:
    tensors = {name: stored(values, F32) for name, values in complete().items()}
    del tensors["blk.0.attn_norm.weight"]
    with pytest.raises(ModelError, match=r"lack model\.layers\.0\.input_layernorm\.weight"):
        load(write_gguf(tmp_path / "model.gguf", META, tensors))


def test_a_quantised_vector(tmp_path: Path) -> None:
    tensors = {name: stored(values, F32) for name, values in complete().items()}
    tensors["output_norm.weight"] = Tensor(Q8_0, (32,), bytes(34))
    with pytest.raises(ModelError, match=r"output_norm.weight of type Q8_0 has the shape \[32\]"):
        load(write_gguf(tmp_path / "model.gguf", META, tensors))


def test_damaged_anywhere(tmp_path: Path) -> None:
    """Whatever bytes of the metadata change, the model is loaded or refused."""
    folder = write_checkpoint(tmp_path / "gpt2", "gpt2").directory
    path = convert(folder, tmp_path / "model.gguf", Q8_0)
    whole = path.read_bytes()
    numbers, num_loaded = random.Random(7), 0
    for _ in range(300):
        raw = bytearray(whole)
        for _ in range(numbers.choice((1, 2))):
            raw[numbers.randrange(1200)] = numbers.choice((0, 1, 2, 127, 255))
        path.write_bytes(raw)
        try:
            load(path)
            num_loaded += 1
        except ModelError:
            continue
    assert 10 < num_loaded < 290


def complete() -> dict[str, Any]:
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    matrices = {f"blk.0.{part}.weight": np.ones((8, 8)) for part in parts}
    norms = {f"{name}.weight": np.ones(8) for name in ("blk.0.attn_norm", "blk.0.ffn_norm")}
    return (
        {"token_embd.weight": np.ones((4, 8)), "output_norm.weight": np.ones(8)} | matrices | norms
    )
