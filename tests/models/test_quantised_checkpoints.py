"""Checkpoints of other quantisers: exact values of tensors, and errors for invalid ones.

Covers `spec/quantization_config.py`, `models/quantised/layers.py`.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.base.errors import ModelError
from quire.base.settings.config import ModelConfig
from quire.models.checkpoint.formats import AS_THEY_ARE, IN_THE_DTYPE, weight_formats
from quire.models.load.assembly import all_weights
from quire.models.load.cache_files import WeightCache
from quire.models.load.loading import LoadOptions, formats_of_file, load_model
from quire.models.load.packing import model_bytes, planned_bytes
from quire.models.parts.layers import Linear
from quire.models.quantised.layers import FORMS
from quire.models.registry import make_model, model_spec
from quire.ops.host.native import core
from quire.ops.weights.packed import PackedParts, PackedWeight
from quire.spec import quantization_config as forms
from quire.spec.model_spec import load_spec, parse_spec
from quire.spec.quantization_config import StoredWeight
from tests.support.cases import slow_but
from tests.support.models import quantised_writers as writers
from tests.support.models.checkpoints import (
    HYBRID,
    LATENT,
    LLAMA,
    ROUTED,
    exact_logits,
    random_tokens,
)
from tests.support.models.paged_forward import CPU, run_paged
from tests.support.models.quantised_writers import Format, compressed, float8, gptq, integers_of

SEQUENCES = random_tokens(11, 3)
WHOLE = SEQUENCES, [[11], [3]]
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}

FORMATS: dict[str, Format] = {
    "gptq": gptq(4, 32),
    "gptq asymmetric": gptq(4, 32, symmetric=False),
    "gptq 8 bits": gptq(8, 32, symmetric=False),
    "gptq rows": gptq(4, -1),
    "gptq ordered": gptq(4, 32, desc_act=True, symmetric=False),
    "gptq version 2": gptq(4, 32, symmetric=False, version=2),
    "awq": writers.awq(32),
    "packed": integers_of(4, "group", 32),
    "packed asymmetric": integers_of(4, "group", 32, symmetric=False),
    "packed ordered": integers_of(4, "group", 32, ordered=True),
    "packed rows": integers_of(8, "channel", symmetric=False),
    "packed tensor": integers_of(8, "tensor"),
    "integers": integers_of(8, "channel", packed=False),
    "integers asymmetric": integers_of(8, "channel", packed=False, symmetric=False),
    "integers tensor": integers_of(8, "tensor", packed=False, symmetric=False),
    "float blocks": float8("block", BLOCKS, end="weight_scale_inv"),
    "float blocks bfloat16": float8("block", BLOCKS, end="weight_scale_inv", scale="bfloat16"),
    "float powers": float8(
        "block", BLOCKS | {"scale_fmt": "ue8m0"}, end="weight_scale_inv", scale="power"
    ),
    "float tensor": float8("tensor", STATIC, end="weight_scale"),
    "fbgemm": float8("channel", {"quant_method": "fbgemm_fp8"}, end="weight_scale"),
    "modelopt": float8(
        "tensor",
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        end="weight_scale",
    ),
    "float channel": float8(
        "channel",
        compressed("float-quantized", FLOAT | {"strategy": "channel"}),
        end="weight_scale",
    ),
    "float groups": float8(
        "group",
        compressed("float-quantized", FLOAT | {"strategy": "group", "group_size": 32}),
        end="weight_scale",
    ),
    "mxfp4": writers.float4(),
}


def exact_model(path: Path) -> Any:
    return load_model(path, model_spec(path), torch.float64, CPU)


@pytest.mark.parametrize("name", FORMATS)
def test_dequantised_weights_match_the_plain_checkpoint(name: str, tmp_path: Path) -> None:
    quantised, plain = writers.write(tmp_path, FORMATS[name])
    got, wanted = exact_model(quantised), exact_model(plain)
    for (path, ours), (_, theirs) in zip(
        got.named_parameters(), wanted.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), path
    logits = run_paged(
        got,
        load_spec(quantised),
        SEQUENCES,
        [[4, 7], [3]],
        backend="reference",
        dtype=torch.float64,
    )
    for ours, theirs in zip(logits, exact_logits(plain, SEQUENCES), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["gptq ordered", "awq", "float blocks", "integers", "mxfp4"])
def test_conversion_to_the_dtype_rounds_each_number_once(name: str, tmp_path: Path) -> None:
    quantised, plain = writers.write(tmp_path, FORMATS[name])
    options = LoadOptions(formats=IN_THE_DTYPE)
    got = load_model(quantised, load_spec(quantised), torch.bfloat16, CPU, options)
    wanted = load_model(plain, load_spec(plain), torch.bfloat16, CPU, options)
    for ours, theirs in zip(all_weights(got), all_weights(wanted), strict=True):
        assert torch.equal(bits(ours), bits(theirs)), ours[0]


def bits(named: tuple[str, torch.nn.Module, str]) -> torch.Tensor:
    _, owner, name = named
    weight = getattr(owner, name).data
    weight = weight.to_dense() if weight.is_mkldnn else weight
    return weight.contiguous().view(-1).view(torch.uint8)


def test_fp8_and_mxfp4_match_transformers(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 96, generator=generator)
    tensors, _ = FORMATS["float blocks"].writer("m", weight)
    theirs = Fp8Dequantize._dequantize_one(
        None, tensors["weight"], tensors["weight_scale_inv"], torch.float32
    )
    how = StoredWeight(forms.FLOAT8, 8, 32, 32)
    stored = {f".{end}": tensor for end, tensor in tensors.items()}
    ours = FORMS[forms.FLOAT8].rows(how, (64, 96), stored)
    assert torch.equal(ours.dequantised(), theirs)
    blocks = torch.randint(256, (3, 64, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 140, (3, 64, 2), dtype=torch.uint8, generator=generator)
    stored = {"_blocks": blocks[1], "_scales": scales[1]}
    rows = FORMS[forms.FLOAT4_BLOCKS].rows(StoredWeight("mxfp4", 4, 32), (64, 64), stored)
    # transformers' tensors are [experts, K, N]
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[1].t()
    assert torch.equal(rows.dequantised(), wanted)


# ---- modules that stay plain, and their names ---------------------------------------------------


def test_modules_that_are_stored_plain_are_read(tmp_path: Path) -> None:
    """Ignore lists, a quantised head, and one part of a merged layer that is plain."""
    form = replace(FORMATS["packed"], left_out=("v_proj", "layers.1.mlp.down_proj"))
    quantised, plain = writers.write(tmp_path, form)
    assert_same(exact_model(quantised), exact_model(plain))
    if core() is not None:
        assert_near(quantised, plain, 0.08)


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
def test_parts_of_a_layer_that_differ_are_separate_products(tmp_path: Path) -> None:
    """They differ in bits, in the size of groups, or in the order of inputs."""
    sizes = {"q_proj": FORMATS["gptq"], "k_proj": gptq(4, 16), "gate_proj": gptq(8, 32)}

    def writer(module: str, weight: torch.Tensor) -> tuple[writers.Tensors, torch.Tensor]:
        return sizes.get(module.rpartition(".")[2], FORMATS["gptq ordered"]).writer(module, weight)

    dynamic = {r".*k_proj": {"group_size": 16}, r"+:.*gate_proj": {"bits": 8}}
    config = FORMATS["gptq ordered"].config | {"dynamic": dynamic}
    quantised, plain = writers.write(tmp_path, Format(writer, config))
    model = assert_near(quantised, plain, 0.08)
    kinds = [type(m.weight) for m in model.modules() if isinstance(m, Linear)]
    assert kinds.count(PackedParts) == 4  # in both layers: queries, keys and values; gate and up


def test_config_groups_apply_by_name_pattern_and_class(tmp_path: Path) -> None:
    words, eights = FORMATS["packed"], FORMATS["float channel"]

    def writer(module: str, weight: torch.Tensor) -> tuple[writers.Tensors, torch.Tensor]:
        is_eight = module.endswith("down_proj") or module == "model.layers.0.self_attn.o_proj"
        return (eights if is_eight else words).writer(module, weight)

    groups = {
        "a": words.config["config_groups"]["group_0"],
        "b": eights.config["config_groups"]["group_0"]
        | {
            "targets": ["re:.*down_proj$", "model.layers.0.self_attn.o_proj"],
            "format": "float-quantized",
        },
    }
    config = words.config | {"config_groups": groups, "ignore": ["re:lm_.*"]}
    quantised, plain = writers.write(tmp_path, Format(writer, config))
    assert_same(exact_model(quantised), exact_model(plain))
    read = load_spec(quantised).quantization
    assert read is not None and read.excludes("lm_head") and not read.excludes("model.lm_head")


def test_gptq_sizes_apply_by_pattern(tmp_path: Path) -> None:
    small, large = gptq(4, 32), gptq(8, 16)

    def writer(module: str, weight: torch.Tensor) -> tuple[writers.Tensors, torch.Tensor]:
        return (large if module.endswith("o_proj") else small).writer(module, weight)

    dynamic = {r"+:.*\.o_proj": {"bits": 8, "group_size": 16}, r"-:.*\.1\.mlp\.down": {}}
    form = Format(writer, small.config | {"dynamic": dynamic}, ("lm_head", "1.mlp.down"))
    quantised, plain = writers.write(tmp_path, form)
    assert_same(exact_model(quantised), exact_model(plain))


def test_a_separate_quantize_config_file_is_read(tmp_path: Path) -> None:
    quantised, plain = writers.write(tmp_path, FORMATS["gptq ordered"])
    config = quantised / "config.json"
    raw = json.loads(config.read_text())
    stored = raw.pop("quantization_config")
    config.write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=r"qweight.*quantization_config does not list them"):
        exact_model(quantised)
    del stored["quant_method"]
    (quantised / "quantize_config.json").write_text(json.dumps(stored))
    assert_same(exact_model(quantised), exact_model(plain))


@pytest.mark.parametrize("model_type", ["qwen2", "gpt2", "phi3", "qwen3_moe"])
def test_biases_fused_layers_and_experts_are_dequantised(model_type: str, tmp_path: Path) -> None:
    """Phi 3's queries, keys and values are one module; GPT-2's plain weights are transposed."""
    more: dict[str, Any] = {}
    form = replace(gptq(4, 32, symmetric=False), left_out=("lm_head", "wte", "wpe", "mlp.gate."))
    if model_type == "gpt2":
        more = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
        turned = form.writer

        def writer(module: str, weight: torch.Tensor) -> tuple[writers.Tensors, torch.Tensor]:
            tensors, numbers = turned(module, weight.t().contiguous())
            del tensors["bias"]
            return tensors, numbers.t()

        form = replace(form, writer=writer)
    if model_type == "qwen2":
        untouched = form.writer

        def without_bias(module: str, weight: torch.Tensor) -> tuple[writers.Tensors, torch.Tensor]:
            tensors, numbers = untouched(module, weight)
            del tensors["bias"]
            return tensors, numbers

        form = replace(form, writer=without_bias)
    if model_type == "phi3":
        more = {"pad_token_id": 0}
    if model_type == "qwen3_moe":
        more = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    quantised, plain = writers.write(tmp_path, form, model_type, **more)
    assert_same(exact_model(quantised), exact_model(plain))


def test_transformers_classes_read_quantised_weights(tmp_path: Path) -> None:
    quantised, plain = writers.write(tmp_path, FORMATS["gptq ordered"], "stablelm")
    assert_same(exact_model(quantised), exact_model(plain))


def test_gpt_oss_experts_in_mxfp4_are_dequantised(tmp_path: Path) -> None:
    """One tensor has all experts of a layer, with alternating rows of gate and up."""
    keep_all = Format(FORMATS["awq"].writer, {"quant_method": "mxfp4"}, ("",))
    sizes = {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    quantised, plain = writers.write(tmp_path, keep_all, "gpt_oss", head_dim=16, **sizes)
    file = quantised / "model.safetensors"
    stored, numbers = writers.experts_in_blocks(load_file(file))
    assert stored.keys() != numbers.keys()
    save_file({name: each.contiguous() for name, each in stored.items()}, file)
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    assert_same(exact_model(quantised), exact_model(plain))
    if core() is not None:
        model = assert_near(quantised, plain, 0.15)
        formats = {m.weight.format for m in model.modules() if isinstance(m, Linear)}
        assert "mxfp4" in formats


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
@pytest.mark.parametrize("name", ["gptq ordered", "float blocks", "mxfp4"])
def test_the_next_start_maps_cached_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised, _ = writers.write(tmp_path, FORMATS[name])
    spec, options = load_spec(quantised), LoadOptions(cache=WeightCache(tmp_path / "cache"))
    first = load_model(quantised, spec, torch.bfloat16, CPU, options)
    monkeypatch.setattr("quire.models.load.loading.fill_from_files", None)
    second = load_model(quantised, spec, torch.bfloat16, CPU, options)
    for ours, theirs in zip(all_weights(first), all_weights(second), strict=True):
        assert torch.equal(bits(ours), bits(theirs)), ours[0]
    monkeypatch.undo()
    plain = LoadOptions(cache=options.cache, formats=IN_THE_DTYPE)
    third = load_model(quantised, spec, torch.bfloat16, CPU, plain)
    assert model_bytes(third) > model_bytes(second)


def assert_same(got: torch.nn.Module, wanted: torch.nn.Module) -> None:
    for (path, ours), (_, theirs) in zip(
        got.named_parameters(), wanted.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), path


def assert_near(quantised: Path, plain: Path, max_error: float) -> torch.nn.Module:
    """Load a model in its stored format. Its logits differ by the rounding of activations."""
    spec = load_spec(quantised)
    model = load_model(quantised, spec, torch.float32, CPU)
    wanted = torch.cat(run_paged(exact_model(plain), load_spec(plain), *WHOLE, dtype=torch.float64))
    got = torch.cat(run_paged(model, spec, *WHOLE))
    error = ((got - wanted).norm() / wanted.norm()).item()
    assert 0 < error < max_error, error
    return model


# ---- errors ------------------------------------------------------------------------------------

O_PROJ = "model.layers.1.self_attn.o_proj"
BROKEN: list[tuple[str, str, Any, str]] = [
    (
        "gptq",
        "scales",
        None,
        r"o_proj is stored as gptq, but the weight files lack .*proj\.scales",
    ),
    ("gptq", "scales", torch.ones(3, 64), r"scales has the shape \[3, 64\], .* requires \[2, 64\]"),
    ("gptq", "qweight", torch.zeros(8, 64), r"qweight holds F32, not I32"),
    ("gptq", "g_idx", torch.arange(64, dtype=torch.int32) % 3, r"not of 32 inputs each"),
    ("gptq", "bias", torch.ones(64), r"bias is not 0, but the model has no such bias"),
    (
        "packed",
        "weight_shape",
        torch.tensor([64, 63]),
        r"weight_shape is \[64, 63\], not \[64",
    ),
    ("float blocks", "weight_scale_inv", None, r"lack .*o_proj\.weight_scale_inv"),
    ("float blocks", "weight_scale_inv", torch.ones(5, 2), r"shape \[5, 2\], but"),
    ("float blocks", "more", torch.ones(5), r"hold unknown tensors \(.*o_proj\.more\)"),
    ("awq", "qzeros", None, r"lack .*o_proj\.qzeros"),
]


@pytest.mark.parametrize(("name", "end", "tensor", "message"), BROKEN, ids=str)
def test_invalid_tensors_are_refused(
    name: str, end: str, tensor: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    quantised, _ = writers.write(tmp_path, FORMATS[name])
    file = quantised / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(f"{O_PROJ}.{end}", None)
    save_file(tensors if tensor is None else tensors | {f"{O_PROJ}.{end}": tensor}, file)
    with pytest.raises(ModelError, match=message):
        exact_model(quantised)


GPTQ_CONFIG, AWQ_CONFIG = FORMATS["gptq"].config, FORMATS["awq"].config
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "aqlm"}, r"quant_method is 'aqlm'; .* not supported .*take the checkpoint"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"'bitsandbytes'; .* a GGUF file"),
    (GPTQ_CONFIG | {"bits": 3}, r"bits is 3; only 4 and 8"),
    (GPTQ_CONFIG | {"group_size": 0}, r"group_size is 0"),
    (GPTQ_CONFIG | {"checkpoint_format": "marlin"}, r"checkpoint_format is 'marlin'"),
    (GPTQ_CONFIG | {"is_marlin_format": True}, r"is_marlin_format is true"),
    (GPTQ_CONFIG | {"rotation": "hadamard"}, r"rotation is 'hadamard'; its effect"),
    (GPTQ_CONFIG | {"adapter": {"rank": 8}}, r"adapter is \{'rank': 8\}"),
    (GPTQ_CONFIG | {"dynamic": {"+:(": {"bits": 8}}}, r"not a regular expression"),
    (AWQ_CONFIG | {"version": "gemv"}, r"version is 'gemv'"),
    (AWQ_CONFIG | {"bits": 8}, r"bits is 8; only 4"),
    (AWQ_CONFIG | {"zero_point": False}, r"zero_point is false"),
    (BLOCKS | {"fmt": "e5m2"}, r"fmt is 'e5m2'"),
    (BLOCKS | {"weight_block_size": [128]}, r"weight_block_size is \[128\]"),
    (BLOCKS | {"expert_dtype": "fp4"}, r"expert_dtype is 'fp4'"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"quant_algo is 'NVFP4'"),
    (compressed("nvfp4-pack-quantized", FLOAT), r"format is 'nvfp4-pack-quantized'"),
    (compressed("pack-quantized", {"num_bits": 3, "type": "int"}), r"num_bits is 3"),
    (compressed("pack-quantized", {"num_bits": 8, "type": "float"}), r"type is 'float'"),
    (compressed("float-quantized", FLOAT | {"strategy": "block"}), r"block_structure is null"),
    (compressed("int-quantized", {"strategy": "token"}), r"strategy is 'token'"),
    (compressed("int-quantized", {"dynamic": True}), r"dynamic is true"),
    (
        compressed("pack-quantized", FLOAT, quantization_status="frozen"),
        r"quantization_status is 'frozen'",
    ),
    (
        compressed("pack-quantized", FLOAT, sparsity_config={"format": "sparse-24-bitmask"}),
        r"format is 'sparse-24-bitmask'",
    ),
    (
        compressed("pack-quantized", FLOAT, transform_config={"config_groups": {"a": 1}}),
        r"transform_config is \{",
    ),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=str)
def test_unsupported_configs_are_refused_by_field_and_value(
    config: dict[str, Any], message: str
) -> None:
    raw = LLAMA | {"model_type": "llama", "quantization_config": config}
    with pytest.raises(ModelError, match=message):
        parse_spec(raw).check()


def test_quantising_a_second_time_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, _ = writers.write(tmp_path, FORMATS["awq"])
    formats = weight_formats(ModelConfig(quantization="int8"))
    if core() is None:
        pytest.skip("the C++ core is not built")
    load_model(quantised, load_spec(quantised), torch.float32, CPU, LoadOptions(formats=formats))
    assert "rounds a second time" in caplog.text


# ---- as they are stored ------------------------------------------------------------------------

# Activations are rounded to int8 for integer weights, and not rounded for fp8 weights.
MAX_ERROR = {"float": 0.001, "fbgemm": 0.001, "modelopt": 0.001}


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
@pytest.mark.parametrize("name", slow_but(FORMATS, *tuple(FORMATS)[::2]))
def test_weights_stay_quantised(name: str, tmp_path: Path) -> None:
    quantised, plain = writers.write(tmp_path, FORMATS[name])
    spec, dtype = load_spec(quantised), torch.float32
    model = assert_near(quantised, plain, MAX_ERROR.get(name.split()[0], 0.08))
    for layer in model.modules():
        if isinstance(layer, Linear):
            assert isinstance(layer.weight, PackedWeight)
            assert layer.weight.format not in ("float32", "bfloat16")
    empty = make_model(spec, dtype, torch.device("meta"))
    stored = formats_of_file(quantised, spec, empty, dtype, CPU, AS_THEY_ARE)
    assert planned_bytes(empty, dtype, CPU, AS_THEY_ARE, stored) == pytest.approx(
        model_bytes(model),
        rel=0.03,  # the order of inputs is not planned for
    )


@pytest.mark.parametrize("name", ["gptq ordered", "awq", "float blocks"])
def test_linear_attention_with_plain_gates_is_read(name: str, tmp_path: Path) -> None:
    """Their rows are too few for blocks, so quantisers leave them out."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    sizes |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_value_heads": 4}
    plain_ones = ("lm_head", "in_proj_a", "in_proj_b", "conv1d")
    form = replace(FORMATS[name], left_out=plain_ones)
    quantised, plain = writers.write(tmp_path, form, "qwen3_5_text", **(HYBRID | sizes))
    assert_same(exact_model(quantised), exact_model(plain))
    if core() is not None:
        assert_near(quantised, plain, 0.3)


@pytest.mark.parametrize("name", ["float blocks", "gptq ordered", "packed"])
def test_latent_attention_dequantises_its_heads(name: str, tmp_path: Path) -> None:
    """The module of all heads is dequantised and cut by head, because blocks span heads."""
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64,
        "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 14, "qk_rope_head_dim": 32,
        "v_head_dim": 18, "num_hidden_layers": 2,
    }  # fmt: skip
    form = replace(FORMATS[name], left_out=(*FORMATS[name].left_out, "mlp.gate"))
    quantised, plain = writers.write(tmp_path, form, "deepseek_v3", **(LATENT | ROUTED | sizes))
    assert_same(exact_model(quantised), exact_model(plain))
    if core() is not None:
        assert_near(quantised, plain, 0.15)
