"""A checkpoint that is written as a GGUF file gives the same model.

Covers `spec/gguf/config.py` and `models/gguf/stored.py`.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.base.errors import ModelError
from quire.base.settings.config import ModelConfig, config_from_flat
from quire.models.checkpoint.files import checkpoint_files
from quire.models.checkpoint.formats import IN_THE_DTYPE, weight_formats
from quire.models.checkpoint.source import resolve_model
from quire.models.gguf.dequantise import LAYOUTS, dequantise
from quire.models.gguf.stored import FORMATS, format_of
from quire.models.gguf.weights import gguf_tensors
from quire.models.load.cache_files import WeightCache
from quire.models.load.loading import LoadOptions, load_model
from quire.models.load.packing import model_bytes
from quire.ops.host.native import core
from quire.ops.linear import linear
from quire.ops.weights.formats import variants
from quire.ops.weights.pack import pack_blocks
from quire.ops.weights.packed import Packed, PackedParts, PackedWeight
from quire.runner.setup.preview import preview_runner
from quire.spec.gguf.container import KINDS, TEXT, ArrayEntry, GGUFFile, TensorKind
from quire.spec.model_spec import ModelSpec, load_spec
from tests.ops.test_linear import quantised_activations
from tests.ops.test_linear import random as random_numbers
from tests.support.cases import slow_but
from tests.support.models.checkpoints import Checkpoint, random_tokens, write_checkpoint
from tests.support.models.gguf_writer import (
    BF16,
    F16,
    F32,
    META,
    MXFP4,
    Q4_0,
    Q8_0,
    Tensor,
    convert,
    model_metadata,
    stored,
    write_gguf,
)
from tests.support.models.paged_forward import CPU, run_paged

needs_core = pytest.mark.skipif(core() is None, reason="the C++ core is not built")
SEQUENCES = random_tokens(23, 5, 61, 1)
WHOLE = [[23], [5], [61], [1]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def logits(model: torch.nn.Module, spec: ModelSpec, dtype: torch.dtype) -> list[torch.Tensor]:
    return run_paged(model, spec, SEQUENCES, WHOLE, backend="reference", dtype=dtype)


@pytest.mark.parametrize(
    ("kind", "limit"), [(F16, 0.01), (BF16, 0.05), (Q8_0, 0.05), (Q4_0, 0.6)], ids=str
)
@pytest.mark.parametrize("variant", ["llama", "gpt2"])
def test_smaller_formats_give_close_logits(
    tmp_path: Path, variant: str, kind: int, limit: float
) -> None:
    """limit: the maximum mean error, as a share of the logits' standard deviation."""
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


def test_parameters_equal_the_checkpoints(llama: Checkpoint, tmp_path: Path) -> None:
    """Rows of queries and keys are in quire's order."""
    path = convert(llama.directory, tmp_path / "model.gguf", BF16)
    spec = load_spec(path)
    wanted = load_model(llama.directory, llama.spec, torch.bfloat16, CPU)
    got = load_model(path, spec, torch.bfloat16, CPU)
    x = torch.eye(32, dtype=torch.bfloat16)
    for one, other in zip(got.layers, wanted.layers, strict=True):
        assert torch.equal(one.attention.qkv(x), other.attention.qkv(x))
    assert torch.equal(got.embedding.weight, wanted.embedding.weight)


def test_filling_matrices_in_parts_gives_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: Checkpoint
) -> None:
    path = convert(llama.directory, tmp_path / "model.gguf", Q8_0)
    spec = load_spec(path)
    whole = logits(load_model(path, spec, torch.float32, CPU), spec, torch.float32)
    monkeypatch.setattr("quire.models.gguf.weights.VALUES_AT_ONCE", 100)
    parts = logits(load_model(path, spec, torch.float32, CPU), spec, torch.float32)
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a, b)


def test_quantised_blocks_are_in_quires_order_of_rows(llama: Checkpoint, tmp_path: Path) -> None:
    """A kernel for Q8_0 would get these bytes."""
    file = GGUFFile(convert(llama.directory, tmp_path / "model.gguf", Q8_0))
    spec = load_spec(file.path)
    wanted = llama.model.get_parameter("model.layers.1.self_attn.k_proj.weight").detach().numpy()
    (k,) = [
        t for t in gguf_tensors(file, spec) if t.name.endswith("layers.1.self_attn.k_proj.weight")
    ]
    assert k.kind.name == "Q8_0"
    assert k.blocks(3, 11).tobytes() == stored(wanted, Q8_0).data[3 * 34 : 11 * 34]


def test_progress_rises_to_the_total(llama: Checkpoint, tmp_path: Path) -> None:
    path = convert(llama.directory, tmp_path / "model.gguf", Q8_0)
    seen: list[tuple[int, int]] = []
    load_model(path, load_spec(path), torch.float32, CPU, progress=lambda *at: seen.append(at))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 0


def test_the_path_of_a_gguf_file_is_resolved(llama: Checkpoint, tmp_path: Path) -> None:
    path = convert(llama.directory, tmp_path / "tiny-Q8_0.gguf", Q8_0)
    source = resolve_model(str(path))
    assert (source.directory, source.load_format, source.name) == (path, "auto", "tiny-Q8_0")
    with pytest.raises(ModelError, match="no config.json; to load tiny-Q8_0.gguf, give the path"):
        load_spec(tmp_path)


def split(path: Path, folder: Path, changes: dict[int, dict[str, int]] | None = None) -> list[Path]:
    """Write a GGUF file again as two parts, as llama-gguf-split does."""
    whole = GGUFFile(path)
    names, parts = [*whole.tensors], []
    half = len(names) // 2
    for number, own in enumerate((names[:half], names[half:])):
        meta: dict[str, Any] = (
            {key: _plain(whole, key) for key in whole.metadata} if not number else {}
        )
        meta |= {"split.no": number, "split.count": 2, "split.tensors.count": len(names)}
        meta |= (changes or {}).get(number, {})
        tensors = {
            name: Tensor(_NUMBERS[t.kind.name], t.shape, bytes(whole.data(t)))
            for name in own
            for t in [whole.tensors[name]]
        }
        parts.append(write_gguf(folder / f"tiny-0000{number + 1}-of-00002.gguf", meta, tensors))
    return parts


_NUMBERS = {kind.name: number for number, kind in KINDS.items()}


def _plain(file: GGUFFile, key: str) -> Any:
    value = file.metadata[key]
    if not isinstance(value, ArrayEntry):
        return value
    return file.texts(key) if value.kind == TEXT else [int(each) for each in file.numbers(key)]


def test_split_files_are_one_model(llama: Checkpoint, tmp_path: Path) -> None:
    """The path of any part loads all parts. Each part belongs to the model's identity."""
    path = convert(llama.directory, tmp_path / "whole.gguf", Q8_0)
    parts = split(path, tmp_path)
    source = resolve_model(str(parts[1]))
    assert (source.directory, source.name) == (parts[0], "tiny")
    assert checkpoint_files(source.directory) == parts
    whole, both = GGUFFile(path), GGUFFile(parts[0])
    assert {*both.tensors} == {*whole.tensors}
    for name, place in whole.tensors.items():
        assert both.data(both.tensors[name]) == whole.data(place)
        both.forget(both.tensors[name])
    assert load_spec(parts[0]) == load_spec(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({1: {"split.no": 0}}, "is not part 2 of 2 by its metadata"),
        ({1: {"split.count": 3}}, "is not part 2 of 2"),
        ({0: {"split.tensors.count": 99}}, "tensors, not 99. Download"),
        ({0: {"split.count": 3}}, "one of 3 parts of a model; join them"),
    ],
)
def test_parts_that_do_not_match_are_refused(
    llama: Checkpoint, tmp_path: Path, changes: dict[int, dict[str, int]], message: str
) -> None:
    path = convert(llama.directory, tmp_path / "whole.gguf", Q8_0)
    parts = split(path, tmp_path, changes)
    with pytest.raises(ModelError, match=message):
        GGUFFile(parts[0])


def test_a_missing_part_is_refused(llama: Checkpoint, tmp_path: Path) -> None:
    parts = split(convert(llama.directory, tmp_path / "whole.gguf", Q8_0), tmp_path)
    parts[1].unlink()
    with pytest.raises(ModelError, match="tiny-00002-of-00002.gguf is missing. Put all parts"):
        resolve_model(str(parts[0]))


# ---- errors ----------------------------------------------------------------------------------

EMBEDDING = {"token_embd.weight": stored(np.zeros((4, 8)), F32)}
NAN = float("nan")
OF_QWEN2 = {key.replace("llama", "qwen2"): value for key, value in META.items()}
OF_QWEN2["general.architecture"] = "qwen2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"general.architecture": "mamba"},
            "'mamba'; supported architectures are llama, qwen2, qwen3",
        ),
        ({"general.architecture": 3}, "general.architecture must be a text"),
        ({"split.count": 3}, "one of 3 parts of a model; join them"),
        ({"llama.expert_count": 8}, "blk.0.ffn_gate_exps.weight is missing, but the metadata asks"),
        (OF_QWEN2 | {"qwen2.expert_count": 8}, "a mixture of experts"),
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
        (
            {"llama.rope.scaling.attn_factor": 1.5},
            "attn_factor is 1.5; it is supported only with yarn",
        ),
        ({"llama.attention.layer_norm_rms_epsilon": NAN}, "epsilon is nan"),
        ({"llama.context_length": "long"}, "context_length must be a whole number"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id must be a whole number"),
    ],
)
def test_unsupported_metadata_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    tensors = {name: stored(values, F32) for name, values in complete().items()}
    with pytest.raises(ModelError, match=message):
        load_spec(write_gguf(tmp_path / "model.gguf", META | change, tensors))


def test_a_file_without_an_embedding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tensor token_embd\.weight"):
        load_spec(write_gguf(tmp_path / "model.gguf", META))


def test_invalid_rotary_divisors_are_refused(tmp_path: Path) -> None:
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
def test_unknown_and_misshapen_tensors_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    tensors = {name: stored(values, F32) for name, values in complete().items()}
    load(write_gguf(tmp_path / "good.gguf", META, tensors))
    tensors |= {name: stored(values, F32) for name, values in change.items()}
    with pytest.raises(ModelError, match=message):
        load(write_gguf(tmp_path / "bad.gguf", META, tensors))


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    tensors = {name: stored(values, F32) for name, values in complete().items()}
    del tensors["blk.0.attn_norm.weight"]
    with pytest.raises(ModelError, match=r"lack model\.layers\.0\.input_layernorm\.weight"):
        load(write_gguf(tmp_path / "model.gguf", META, tensors))


def test_a_quantised_norm_vector_is_refused(tmp_path: Path) -> None:
    tensors = {name: stored(values, F32) for name, values in complete().items()}
    tensors["output_norm.weight"] = Tensor(Q8_0, (32,), bytes(34))
    with pytest.raises(ModelError, match=r"output_norm.weight of type Q8_0 has the shape \[32\]"):
        load(write_gguf(tmp_path / "model.gguf", META, tensors))


def test_damaged_metadata_is_loaded_or_refused(tmp_path: Path) -> None:
    """Random bytes of the metadata change. No other error is raised."""
    folder = write_checkpoint(tmp_path / "gpt2", "gpt2").directory
    path = convert(folder, tmp_path / "model.gguf", Q8_0)
    whole = path.read_bytes()
    numbers, num_loaded = random.Random(7), 0
    for _ in range(150):
        raw = bytearray(whole)
        for _ in range(numbers.choice((1, 2))):
            raw[numbers.randrange(1200)] = numbers.choice((0, 1, 2, 127, 255))
        path.write_bytes(raw)
        try:
            load(path)
            num_loaded += 1
        except ModelError:
            continue
    assert 5 < num_loaded < 145


def complete() -> dict[str, Any]:
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    matrices = {f"blk.0.{part}.weight": np.ones((8, 8)) for part in parts}
    norms = {f"{name}.weight": np.ones(8) for name in ("blk.0.attn_norm", "blk.0.ffn_norm")}
    return (
        {"token_embd.weight": np.ones((4, 8)), "output_norm.weight": np.ones(8)} | matrices | norms
    )


# ---- packed formats of quantised weights -------------------------------------------------------


def packed_formats(model: torch.nn.Module) -> dict[str, str]:
    return {
        name: weight.format
        for name, module in model.named_modules()
        if isinstance(weight := vars(module).get("weight"), PackedWeight | PackedParts)
    }


def rows(weight: Packed, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.cat([part.rows(torch.arange(part.shape[0]), dtype) for part in weight.parts])


@needs_core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "format"), [(Q8_0, "int8_f16"), (Q4_0, "int4_f16"), (MXFP4, "mxfp4")]
)
@pytest.mark.parametrize(
    "variant",
    slow_but(
        ["llama", "qwen3_tied", "gpt2", "gpt_neox", "phi3", "glm4", "qwen3_moe", "gpt_oss"],
        *("qwen3_tied", "phi3", "gpt_oss"),
    ),
)
def test_quantised_blocks_stay_packed(
    variant: str, kind: int, format: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """They keep their numbers, also in a tied table. Layers whose rows are not whole blocks are in
    the dtype."""
    folder = write_checkpoint(tmp_path / variant, variant).directory
    path = convert(folder, tmp_path / "model.gguf", kind)
    spec = load_spec(path)
    model = load_model(path, spec, dtype, CPU)
    plain = load_model(path, spec, torch.float32, CPU, LoadOptions(formats=IN_THE_DTYPE))
    formats = packed_formats(model)
    blocks = {name for name, found in formats.items() if found == format}
    assert any(name.endswith("qkv") for name in blocks)
    assert "head" in blocks
    down_fits = spec.intermediate_size % 32 == 0
    assert any(name.endswith("down") for name in blocks) == down_fits
    assert set(packed_formats(plain).values()) == {"float32"}
    for name in blocks:
        got, wanted = rows(model.get_submodule(name).weight), plain.get_submodule(name).weight
        assert torch.equal(got, rows(wanted))


def random_blocks(kind: TensorKind, num_rows: int, num_inputs: int) -> torch.Tensor:
    """Return random bits with finite, moderate factors of either sign."""
    numbers = np.random.default_rng(3)
    shape = (num_rows * num_inputs // kind.block_size, kind.block_bytes)
    blocks = numbers.integers(0, 256, shape, np.uint8)
    records = blocks.reshape(-1).view(LAYOUTS[kind.name])
    for name in {"d", "m"} & set(LAYOUTS[kind.name].names or ()):
        records[name] = numbers.normal(scale=0.1, size=len(records))
    if "exponent" in (LAYOUTS[kind.name].names or ()):
        records["exponent"] = numbers.integers(118, 128, size=len(records))
    return torch.from_numpy(blocks.reshape(num_rows, -1))


@needs_core
@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("name", FORMATS)
def test_packing_keeps_every_number(
    name: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Includes -128, -8, negative scales and each position of a block, in rows that fill no panel.
    Products round activations to int8, and are equal in any batch."""
    monkeypatch.setenv("QUIRE_CPU_VARIANT", variant)
    (kind,) = (kind for kind in KINDS.values() if kind.name == name)
    raw, format = random_blocks(kind, 70, 1280), FORMATS[name]
    packed = pack_blocks(raw, [(70, format)])
    wanted = torch.from_numpy(dequantise(kind, raw.numpy()))
    assert torch.equal(rows(packed), wanted)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(rows(packed, dtype), wanted.to(dtype))
    x = random_numbers(13, 1280)
    rounded = quantised_activations(x, format.group_size, rounds_scales=format.format == "int4")
    exact = rounded @ wanted.double().T
    scale = wanted.abs().double().sum(1).max()
    got = linear(x, packed)
    assert (got.double() - exact).abs().max() < 1e-6 * scale
    assert torch.equal(torch.cat([linear(row[None], packed) for row in x]), got)


def with_tensors(path: Path, to: Path, changed: dict[str, Tensor]) -> Path:
    """Write a copy of a GGUF file with other tensors of these names."""
    file, raw = GGUFFile(path), path.read_bytes()
    numbers = {kind: number for number, kind in KINDS.items()}
    tensors = {
        name: Tensor(
            numbers[place.kind], place.shape, raw[place.start : place.start + place.num_bytes]
        )
        for name, place in file.tensors.items()
    }
    metadata = {n: v for n, v in file.metadata.items() if not isinstance(v, ArrayEntry)}
    return write_gguf(to, metadata, tensors | changed)


@needs_core
@pytest.mark.parametrize(
    ("other", "format"), [(F32, "float32"), (Q4_0, "int8_f16, int4_f16, int8_f16")]
)
def test_parts_of_a_merged_layer_keep_their_formats(
    other: int, format: str, llama: Checkpoint, tmp_path: Path
) -> None:
    """Each part is multiplied in its own format. If one part is plain, the whole layer is."""
    path = convert(llama.directory, tmp_path / "model.gguf", Q8_0)
    spec, file = load_spec(path), GGUFFile(path)
    k = file.tensors["blk.1.attn_k.weight"]
    values = dequantise(k.kind, np.frombuffer(file.data(k), np.uint8).reshape(16, -1))
    mixed_path = with_tensors(path, tmp_path / "mixed.gguf", {k.name: stored(values, other)})
    mixed = load_model(mixed_path, spec, torch.float32, CPU)
    formats = packed_formats(mixed)
    assert formats["layers.0.attention.qkv"] == "int8_f16"
    assert formats["layers.1.attention.output"] == "int8_f16"
    assert formats["layers.1.attention.qkv"] == format
    whole = load_model(mixed_path, spec, torch.float32, CPU, LoadOptions(formats=IN_THE_DTYPE))
    qkv, plain = (model.layers[1].attention.qkv for model in (mixed, whole))
    assert torch.equal(rows(qkv.weight), rows(plain.weight))
    config = config_from_flat(model=str(mixed_path), dtype="float32")
    planned = preview_runner(config, resolve_model(str(mixed_path))).weights_bytes
    assert planned == model_bytes(mixed)
    x = random_numbers(7, spec.hidden_size)
    for dtype in (torch.float32, torch.bfloat16):
        got, wanted = qkv(x.to(dtype)), plain(x)
        torch.testing.assert_close(got.float(), wanted, rtol=0.05, atol=0.05)
    lines = random_tokens(23, 5)
    by_operations, by_program = (
        run_paged(mixed, spec, lines, [[23], [5]], backend="cpu", native=native)
        for native in (False, True)
    )
    torch.testing.assert_close(by_program, by_operations, rtol=0, atol=3e-5)
    cached = LoadOptions(cache=WeightCache(tmp_path / "cache"))
    for _ in range(2):
        again = load_model(mixed_path, spec, torch.float32, CPU, cached)
        assert torch.equal(rows(again.layers[1].attention.qkv.weight), rows(qkv.weight))


def k_blocks(kind: int, shape: tuple[int, int], numbers: np.random.Generator) -> Tensor:
    """Return random blocks. Any bits are valid, except in the scales."""
    block_bytes = KINDS[kind].block_bytes
    raw = numbers.integers(0, 256, (shape[0], shape[1] // 256, block_bytes), np.uint8)
    for place in {12: (0, 2), 14: (208,), 17: (0,), 23: (0,), 34: (52,)}[kind]:
        scales = numbers.uniform(1e-4, 2e-4, raw.shape[:2]).astype("<f2")
        raw[..., place : place + 2] = scales[..., None].view(np.uint8)
    return Tensor(kind, shape, raw.tobytes())


@needs_core
@pytest.mark.parametrize("kind", [12, 14, 17, 23, 34], ids=lambda kind: KINDS[kind].name)
def test_formats_with_blocks_of_256_stay_packed(kind: int, tmp_path: Path) -> None:
    """Also in the embedding table of a tied head, and with weights from the cache."""
    numbers, size, inner = np.random.default_rng(5), 256, 512
    config = json.loads(
        (write_checkpoint(tmp_path / "a", "llama_tied").directory / "config.json").read_text()
    )
    config |= {"hidden_size": size, "intermediate_size": inner, "vocab_size": 300}
    config |= {"num_hidden_layers": 1, "head_dim": size // config["num_attention_heads"]}
    kv = size // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"q": (size, size), "k": (kv, size), "v": (kv, size), "output": (size, size)}
    matrices = {f"blk.0.attn_{name}": shape for name, shape in shapes.items()} | {
        "token_embd": (300, size),
        "blk.0.ffn_gate": (inner, size),
        "blk.0.ffn_up": (inner, size),
        "blk.0.ffn_down": (size, inner),
    }
    tensors = {f"{n}.weight": k_blocks(kind, shape, numbers) for n, shape in matrices.items()}
    for norm in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        tensors[f"{norm}.weight"] = stored(np.ones(size), F32)
    path = write_gguf(tmp_path / "model.gguf", model_metadata(config), tensors)
    spec = load_spec(path)
    model = load_model(path, spec, torch.float32, CPU)
    plain = load_model(path, spec, torch.float32, CPU, LoadOptions(formats=IN_THE_DTYPE))
    assert set(packed_formats(model).values()) == {format_of(KINDS[kind]).format}
    config = config_from_flat(model=str(path), dtype="float32")
    assert preview_runner(config, resolve_model(str(path))).weights_bytes == model_bytes(model)
    for name in packed_formats(plain):
        got, wanted = (rows(each.get_submodule(name).weight) for each in (model, plain))
        assert torch.equal(got, wanted), name
    ids = torch.arange(0, 300, 7)
    assert torch.equal(model.embedding(ids), rows(model.head.weight)[ids])
    cached = LoadOptions(cache=WeightCache(tmp_path / "cache"))
    for _ in range(2):
        again = load_model(path, spec, torch.float32, CPU, cached)
        assert torch.equal(again.head.weight.data, model.head.weight.data)


@needs_core
def test_the_quantization_setting_overrides_the_files_formats(
    llama: Checkpoint, tmp_path: Path
) -> None:
    path = convert(llama.directory, tmp_path / "model.gguf", Q8_0)
    spec = load_spec(path)
    int4 = weight_formats(ModelConfig(quantization="int4"))
    model = load_model(path, spec, torch.float32, CPU, LoadOptions(formats=int4))
    assert set(packed_formats(model).values()) == {"int4_multiples", "int8"}
    assert weight_formats(ModelConfig(quantization="none")) == IN_THE_DTYPE
    exact = load_model(path, spec, torch.float64, CPU)
    assert packed_formats(exact) == {}
