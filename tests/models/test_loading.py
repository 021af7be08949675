"""Loading weights: shards, conversion, dummy weights, and errors for weights that do not fit.

Covers `models/load/contents.py`, `models/model.py`.
"""

import json
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quire.base.errors import ModelError, OutOfMemory
from quire.base.settings.config import ModelConfig
from quire.models.checkpoint.files import INDEX, safetensors_shapes, tensor_ranges, weight_files
from quire.models.checkpoint.formats import weight_formats
from quire.models.load import assembly
from quire.models.load.assembly import all_weights
from quire.models.load.loading import LoadOptions, Progress, load_model, model_bytes
from quire.models.parts.layers import Linear, LMHead
from quire.models.registry import make_model
from quire.ops.host.native import core
from quire.ops.weights.mapped_tensors import MappedTensors
from quire.ops.weights.packed import PackedWeight
from quire.spec.model_spec import ModelSpec, load_spec, parse_spec
from tests.support.cases import pairwise
from tests.support.models.checkpoints import (
    GPT2,
    LLAMA,
    VARIANTS,
    Checkpoint,
    random_tokens,
    write_checkpoint,
)
from tests.support.models.paged_forward import CPU, run_paged

TOKENS = random_tokens(9)


def logits_of(model: torch.nn.Module, spec: ModelSpec) -> torch.Tensor:
    return run_paged(model, spec, TOKENS, [[9]])[0]


def load(
    checkpoint: Checkpoint, progress: Progress | None = None, **options: Any
) -> torch.nn.Module:
    folder, spec = checkpoint.directory, checkpoint.spec
    return load_model(folder, spec, torch.float32, CPU, LoadOptions(**options), progress)


def rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of model.safetensors; None removes one."""
    file = directory / "model.safetensors"
    tensors = load_file(file) | {name.replace("__", "."): t for name, t in changes.items()}
    remaining = {name: t.clone() for name, t in tensors.items() if t is not None}
    save_file(remaining, file, metadata={"format": "pt"})


@pytest.fixture
def llama(tmp_path: Path) -> Checkpoint:
    return write_checkpoint(tmp_path, "llama")


def test_shards_are_loaded_with_progress(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "qwen3", max_shard_size="20KB")
    assert (tmp_path / INDEX).exists()
    seen: list[tuple[int, int]] = []
    model = load(checkpoint, progress=lambda done, total: seen.append((done, total)))
    torch.testing.assert_close(
        logits_of(model, checkpoint.spec), checkpoint.logits(TOKENS[0]), rtol=1e-4, atol=1e-4
    )
    assert seen == sorted(seen)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert seen[-1] == (size, size)


@pytest.mark.parametrize("variant", ["gpt2", "opt"])
def test_tensor_names_without_the_base_prefix_are_read(variant: str, tmp_path: Path) -> None:
    """As in the checkpoints on the hub, which were saved from the bare decoder."""
    checkpoint = write_checkpoint(tmp_path, variant)
    wanted = logits_of(load(checkpoint), checkpoint.spec)
    file = tmp_path / "model.safetensors"
    tensors = {name.split(".", 1)[1]: tensor for name, tensor in load_file(file).items()}
    if variant == "gpt2":
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file(tensors, file)
    torch.testing.assert_close(logits_of(load(checkpoint), checkpoint.spec), wanted)


@pytest.mark.parametrize("name", ["embed_out.weight", "lm_head.weight"])
def test_the_head_of_gpt_neox_is_read_under_both_names(name: str, tmp_path: Path) -> None:
    """If the head is tied, a stored copy must equal the embedding."""
    file = tmp_path / "model.safetensors"
    checkpoint = write_checkpoint(tmp_path, "gpt_neox")
    tensors = load_file(file)
    tensors[name] = tensors.pop("embed_out.weight")
    save_file(tensors, file)
    torch.testing.assert_close(
        logits_of(load(checkpoint), checkpoint.spec), checkpoint.logits(TOKENS[0])
    )
    checkpoint = write_checkpoint(tmp_path, "gpt_neox_serial")
    tensors = load_file(file)
    tensors[name] = tensors["gpt_neox.embed_in.weight"].clone()
    save_file(tensors, file)
    load(checkpoint)
    tensors[name][3] = 0.5
    save_file(tensors, file)
    with pytest.raises(ModelError, match=f"{name} is stored and differs .* in row 3"):
        load(checkpoint)


def test_weights_are_converted_to_the_dtype(llama: Checkpoint) -> None:
    model = load_model(llama.directory, llama.spec, torch.bfloat16, CPU)
    got = run_paged(model, llama.spec, TOKENS, [[9]], dtype=torch.bfloat16)[0]
    assert got.dtype == torch.bfloat16
    wanted = llama.logits(TOKENS[0])
    assert (got.float() - wanted).abs().mean() < 0.05 * wanted.abs().mean()


def test_a_stored_copy_of_a_tied_head_is_ignored(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "llama_tied")
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(tmp_path, lm_head__weight=table)
    torch.testing.assert_close(
        logits_of(load(checkpoint), checkpoint.spec),
        checkpoint.logits(TOKENS[0]),
        rtol=1e-4,
        atol=1e-4,
    )


def test_a_stored_head_that_differs_from_the_tied_one_is_refused(tmp_path: Path) -> None:
    """transformers would use the stored head, and warns that the config should be fixed."""
    checkpoint = write_checkpoint(tmp_path, "llama_tied")
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].clone()
    table[5, 3] += 0.5
    rewrite(tmp_path, lm_head__weight=table)
    with pytest.raises(ModelError, match=r"tie_word_embeddings\), but lm_head.* in row 5. Set"):
        load(checkpoint)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    spec = load_spec(tmp_path)
    model = load_model(tmp_path, spec, torch.float32, CPU)
    untied = AutoModelForCausalLM.from_pretrained(tmp_path)(torch.tensor(TOKENS)).logits[0]
    torch.testing.assert_close(logits_of(model, spec), untied, rtol=1e-4, atol=1e-4)


def test_a_tensor_in_two_files_is_refused(llama: Checkpoint) -> None:
    single = llama.directory / "model.safetensors"
    tensors = load_file(single)
    single.rename(llama.directory / "a.safetensors")
    more = {"model.norm.weight": 2 * tensors["model.norm.weight"]}
    save_file(more, llama.directory / "b.safetensors")
    with pytest.raises(ModelError, match=r"a.safetensors and b.safe.* both hold .*model\.norm"):
        load(llama)
    with pytest.raises(ModelError, match=r"both hold model\.norm\.weight"):
        safetensors_shapes(weight_files(llama.directory))
    (llama.directory / "b.safetensors").unlink()
    logits = logits_of(load(llama), llama.spec)
    torch.testing.assert_close(logits, llama.logits(TOKENS[0]), rtol=1e-4, atol=1e-4)


def test_a_tensor_under_two_names_is_refused(llama: Checkpoint) -> None:
    rewrite(llama.directory, norm__weight=torch.ones(32))
    with pytest.raises(ModelError, match="two names"):
        load(llama)


def test_a_single_file_overrides_a_stale_index(tmp_path: Path) -> None:
    """As in transformers. The shards belong to another model."""
    write_checkpoint(tmp_path / "old", "llama", max_shard_size="20KB")
    checkpoint = write_checkpoint(tmp_path / "new", "llama")
    rewrite(checkpoint.directory, lm_head__weight=torch.randn(LLAMA["vocab_size"], 32))
    for file in (tmp_path / "old").glob("model*"):
        shutil.copy(file, checkpoint.directory)
    wanted = AutoModelForCausalLM.from_pretrained(checkpoint.directory)
    logits = logits_of(load(checkpoint), checkpoint.spec)
    found = wanted(torch.tensor(TOKENS)).logits[0]
    torch.testing.assert_close(logits, found, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits, checkpoint.logits(TOKENS[0]), atol=0.1)


def test_integer_tensors_are_refused(llama: Checkpoint) -> None:
    rewrite(llama.directory, model__norm__weight=torch.ones(32, dtype=torch.int8))
    with pytest.raises(ModelError, match=r"model\.norm\.weight holds I8, not floating-point"):
        load(llama)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_oversized_weights_are_refused_before_allocation(
    load_format: str, llama: Checkpoint, peak_unpacked: list[int]
) -> None:
    needed = model_bytes(load(llama))
    load(llama, load_format=load_format, max_bytes=needed)
    del peak_unpacked[1:]
    with pytest.raises(OutOfMemory, match="exceed the free memory"):
        load(llama, load_format=load_format, max_bytes=needed - 1)
    assert peak_unpacked == [0]


def test_shapes_are_checked_before_allocation(llama: Checkpoint, peak_unpacked: list[int]) -> None:
    """The vocabulary of the config would take many gigabytes."""
    config = llama.directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 1 << 26}))
    with pytest.raises(ModelError, match=r"has the shape \[97, 32\], but config.json requires"):
        load_model(llama.directory, load_spec(llama.directory), torch.float32, CPU)
    assert peak_unpacked == [0]


def test_missing_and_unknown_tensors_are_named(llama: Checkpoint) -> None:
    rewrite(llama.directory, model__norm__weight=None, model__extra=torch.ones(2))
    with pytest.raises(ModelError, match="lack model.norm.weight and hold unknown .*model.extra"):
        load(llama)


def test_a_wrong_shape_is_named(llama: Checkpoint) -> None:
    rewrite(llama.directory, model__norm__weight=torch.ones(31))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has the shape \[31\].*\[32\]"):
        load(llama)


def test_a_scalar_is_refused_as_a_weight(llama: Checkpoint) -> None:
    rewrite(llama.directory, model__norm__weight=torch.tensor(1.0))
    with pytest.raises(ModelError, match=r"has the shape \[\]"):
        load(llama)


def test_pickled_weights_are_not_read(llama: Checkpoint) -> None:
    (llama.directory / "model.safetensors").rename(llama.directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match="only as pytorch_model.bin.*convert"):
        load(llama)


def test_a_config_without_weights_requires_dummy_weights(llama: Checkpoint) -> None:
    (llama.directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no \\*.safetensors.*dummy"):
        load(llama)
    load(llama, load_format="dummy")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "llama", max_shard_size="20KB")
    file = sorted(tmp_path.glob("*.safetensors"))[0]
    file.unlink()
    with pytest.raises(ModelError, match=f"lacks {file.name}"):
        load(checkpoint)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../b"}}'])
def test_a_broken_index_is_refused(llama: Checkpoint, text: str) -> None:
    (llama.directory / "model.safetensors").rename(llama.directory / "a.safetensors")
    (llama.directory / INDEX).write_text(text)
    with pytest.raises(ModelError, match="index"):
        load(llama)


def test_a_broken_file_is_refused(llama: Checkpoint) -> None:
    (llama.directory / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match="model.safetensors cannot be read"):
        load(llama)


@pytest.mark.parametrize("problem", ["cut", "missing", "shape", "dtype", "unknown"])
def test_the_last_shard_is_checked_before_allocation(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path, "qwen3", max_shard_size="20KB")
    file = sorted(tmp_path.glob("*.safetensors"))[-1]
    monkeypatch.setattr(assembly.Unit, "make", None)
    tensors = load_file(file)
    name, tensor = sorted(tensors.items())[-1]
    if problem == "cut":
        file.write_bytes(file.read_bytes()[:-100])
        message = f"{file.name} cannot be read.*Download it again"
    elif problem == "missing":
        del tensors[name]
        save_file(tensors, file)
        message = f"lack {name}"
    elif problem == "shape":
        save_file(tensors | {name: tensor[1:].clone()}, file)
        message = f"{name} has the shape"
    elif problem == "dtype":
        save_file(tensors | {name: tensor.to(torch.float8_e4m3fn)}, file)
        message = f"{name} holds F8_E4M3, not floating-point numbers of 16 bits or more"
    else:
        save_file(tensors | {"model.more": tensor.clone()}, file)
        message = r"hold unknown tensors \(model.more\)"
    with pytest.raises(ModelError, match=message):
        load(checkpoint)


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
def test_truncating_a_file_during_loading_is_an_error(llama: Checkpoint) -> None:
    """The file ends within a weight that is read and not mapped, so the process survives."""
    file = llama.directory / "model.safetensors"
    end = tensor_ranges(file)["model.layers.2.self_attn.o_proj.weight"][1]
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read: it ends too early"):
        load(llama, progress=lambda done, total: os.truncate(file, end - 1))


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
@pytest.mark.parametrize(
    ("dtype", "quantization", "variant"),
    pairwise(
        [torch.float32, torch.bfloat16],
        [None, "int8"],
        ["llama_biases", "qwen3_tied", "gpt2", "phi3", "mixtral"],
    ),
)
def test_read_and_mapped_weights_have_the_same_bits(
    variant: str,
    quantization: str | None,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = write_checkpoint(tmp_path, variant, max_shard_size="20KB")
    options = LoadOptions(formats=weight_formats(ModelConfig(quantization=quantization)))

    def weights() -> list[torch.Tensor]:
        model = load_model(checkpoint.directory, checkpoint.spec, dtype, CPU, options)
        found = [getattr(module, name) for _, module, name in all_weights(model)]
        return [each.data.view(-1).view(torch.uint8) for each in found]

    original, positions = MappedTensors.position, []
    monkeypatch.setattr(
        MappedTensors, "position", lambda *args: positions.append(original(*args)) or positions[-1]
    )
    read = weights()
    assert any(positions) == (dtype == torch.float32)  # in the mapped files
    monkeypatch.setattr(MappedTensors, "position", lambda *_: None)
    assert all(map(torch.equal, read, weights()))


@pytest.mark.parametrize("variant", ["llama_biases", "opt_350m", "gpt2", "qwen3_tied"])
def test_dummy_weights_depend_only_on_the_seed(variant: str) -> None:
    model_type, config = VARIANTS[variant]
    spec = parse_spec({"model_type": model_type} | config)

    def make(seed: int) -> torch.Tensor:
        return logits_of(
            load_model(Path(), spec, torch.float32, CPU, LoadOptions("dummy", seed)), spec
        )

    first = make(1)
    assert first.isfinite().all()
    assert first.std() > 0
    torch.testing.assert_close(make(1), first)
    assert not torch.allclose(make(2), first)


def test_bytes_of_a_tied_head_count_once() -> None:
    spec = parse_spec({"model_type": "gpt2"} | GPT2)
    tied = make_model(spec, torch.float32, CPU)
    untied = make_model(
        parse_spec({"model_type": "gpt2", "tie_word_embeddings": False} | GPT2), torch.float32, CPU
    )
    assert model_bytes(untied) - model_bytes(tied) == 97 * 32 * 4


def test_an_unknown_architecture_is_refused() -> None:
    spec = parse_spec({"model_type": "mamba"} | LLAMA)
    with pytest.raises(ModelError, match="'mamba' is not supp.*; supported are .*gpt2.*llama"):
        make_model(spec, torch.float32, CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"hidden_act": "relu"}, "'relu' is not supported"),
        ({"partial_rotary_factor": 0.5}, "part of each head"),
    ],
)
def test_unsupported_values_of_the_config_are_refused(
    change: dict[str, object], message: str
) -> None:
    spec = parse_spec({"model_type": "llama"} | LLAMA | change)
    with pytest.raises(ModelError, match=message):
        make_model(spec, torch.float32, CPU)


# ---- memory ------------------------------------------------------------------------------------


@pytest.fixture
def peak_unpacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that ends with the peak of bytes in unpacked parameters so far."""
    alive: dict[int, int] = {}
    peaks = [0]
    make = assembly._with_memory

    def recorded(*arguments: Any) -> torch.nn.Parameter:
        parameter = make(*arguments)
        key = id(parameter)
        alive[key] = parameter.nbytes
        weakref.finalize(parameter, alive.pop, key)
        peaks.append(max(peaks[-1], sum(alive.values())))
        return parameter

    monkeypatch.setattr(assembly, "_with_memory", recorded)
    return peaks


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("variant", ["llama_biases", "qwen3_tied", "gpt2"])
def test_layers_are_packed_while_they_load(
    variant: str, load_format: str, shard: str, tmp_path: Path, peak_unpacked: list[int]
) -> None:
    """At most two of the largest layers are unpacked at once, besides what stays unpacked. It is
    three if layers span two files."""
    checkpoint = write_checkpoint(tmp_path, variant, max_shard_size=shard)
    model = load(checkpoint, load_format=load_format)
    weights = [m.weight for m in model.modules() if isinstance(m, Linear | LMHead)]
    stays = sum(parameter.nbytes for parameter in model.parameters())
    largest = max(weight.shape[0] * weight.shape[1] * 4 for weight in weights)
    assert all(isinstance(weight, PackedWeight) for weight in weights)
    at_once = 2 if shard == "1GB" else 3
    assert 0 < peak_unpacked[-1] <= stays + at_once * largest < model_bytes(model)


MEASURED = """
import json, sys, torch
from pathlib import Path
from quire.base.settings.config import ModelConfig
from quire.spec.model_spec import parse_spec
from quire.models.load.loading import LoadOptions, load_model, model_bytes
from quire.models.checkpoint.formats import weight_formats

def memory(name):
    text = Path("/proc/self/status").read_text()
    return int(text.split(name + ":")[1].split()[0]) * 1024

spec = parse_spec(json.loads(sys.argv[1]))
formats = weight_formats(ModelConfig(quantization="int4"))
dummy, packed = LoadOptions("dummy"), LoadOptions("dummy", formats=formats)
load_model(Path(), parse_spec(json.loads(sys.argv[2])), torch.float32, torch.device("cpu"), dummy)
before = memory("VmRSS")
model = load_model(Path(), spec, torch.float32, torch.device("cpu"), packed)
print(memory("VmHWM") - before, model_bytes(model))
"""


@pytest.mark.slow  # the test above counts unpacked bytes
@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_near_the_size_of_the_packed_model() -> None:
    """233 MB in float32 become 33 MB. The largest layer has 17 MB."""
    sizes = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 8}
    spec = {"model_type": "llama"} | LLAMA | sizes
    command = [sys.executable, "-c", MEASURED, json.dumps(spec)]
    small = json.dumps({"model_type": "llama"} | LLAMA)
    done = subprocess.run([*command, small], capture_output=True, text=True, check=True)
    peak, packed = map(int, done.stdout.split())
    assert 30e6 < packed < 36e6
    assert peak < packed + 75e6  # a layer, 17 MB of random numbers, and code that is imported late


def test_bytes_are_checked_before_weights_are_read(tmp_path: Path) -> None:
    """A plan that does not fit fails before the files are read."""
    checkpoint = write_checkpoint(tmp_path, "llama")
    seen: list[int] = []
    model = load(checkpoint, check_bytes=seen.append)
    assert seen == [model_bytes(model)]

    def refuse(num_bytes: int) -> None:
        raise OutOfMemory("no room")

    read: list[int] = []
    with pytest.raises(OutOfMemory, match="no room"):
        load(checkpoint, lambda done, total: read.append(done), check_bytes=refuse)
    assert read == []
