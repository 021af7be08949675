"""The parts of an engine's numerics: each change that affects bits changes its part and no other
one."""

import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.base.requests.numerics import PARTS, differing_parts, fingerprint
from quire.base.settings.config import config_from_flat
from quire.engine.start import numerics
from quire.engine.start.numerics import numerics_of, text_digest, weights_digest
from quire.models.checkpoint.source import resolve_model
from quire.ops.weights import formats
from quire.ops.weights.formats import variants
from quire.runner.build import build_runner
from quire.runner.setup.built import BuiltRunner
from tests.support.kernels.kernel_speeds import keep_figures, own_figures
from tests.support.models.gguf_writer import write_gguf
from tests.support.models.reference_checkpoints import changed, checkpoint


@pytest.fixture(scope="module")
def built() -> BuiltRunner:
    path = str(checkpoint("llama"))
    settings = {"dtype": "float32", "max_model_len": 32, "kv_cache_memory_bytes": 1 << 20}
    return build_runner(config_from_flat(model=path, **settings), resolve_model(path))


def name(built: BuiltRunner, **changes: Any) -> str:
    source = resolve_model(str(checkpoint("llama")))
    parts = numerics_of(dataclasses.replace(built, **changes), source)
    return str(fingerprint(parts | {"weights": "the same"}))


def test_each_change_affects_its_own_part(built: BuiltRunner) -> None:
    spec = dataclasses.replace(built.spec, vocab_size=built.spec.vocab_size + 1)
    int8 = dataclasses.replace(built.config.model, quantization="int8")
    cache = dataclasses.replace(built.config.cache, kv_cache_dtype="int8")
    for part, changes in (
        ("formats", {"config": dataclasses.replace(built.config, cache=cache)}),
        ("formats", {"kv_scales": {0: (0.5, 1.0)}}),
        ("formats", {"dtype": "torch.bfloat16"}),
        ("device", {"backend_name": "another"}),
        ("model", {"spec": spec}),
    ):
        assert part in differing_parts(name(built), name(built, **changes)), part
    found = name(built, config=dataclasses.replace(built.config, model=int8))
    assert "formats" in differing_parts(name(built), found)


def test_numerics_depend_on_the_batch_without_the_native_core(
    built: BuiltRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch computes then, and chooses the instruction set."""
    for module in (numerics, formats):
        monkeypatch.setattr(module, "core", lambda: None)
    found = numerics_of(built, resolve_model(str(checkpoint("llama"))))["device"]
    assert "depends on the batch" in found
    assert f"cpu: torch {torch.backends.cpu.get_cpu_capability()}, " in found


def test_context_parallelism_changes_the_device_part(built: BuiltRunner) -> None:
    two = dataclasses.replace(built.config.parallel, tensor_parallel_size=2)
    shared = dataclasses.replace(two, decode_context_parallel_size=2)
    one, other = (dataclasses.replace(built.config, parallel=each) for each in (two, shared))
    assert differing_parts(name(built, config=one), name(built, config=other)) == ["device"]


def test_settings_that_change_no_bits_keep_the_fingerprint(built: BuiltRunner) -> None:
    scheduler = dataclasses.replace(built.config.scheduler, max_num_seqs=3)
    assert name(built, config=dataclasses.replace(built.config, scheduler=scheduler)) == name(built)


@pytest.mark.skipif(len(variants()) < 2, reason="this CPU runs one instruction set")
def test_only_used_instruction_sets_change_the_device_part(
    built: BuiltRunner, tmp_path: Path
) -> None:
    found = []
    with own_figures(tmp_path):
        for faster in ({}, {"float32": variants()[0]}, {"int8": variants()[0]}):
            keep_figures(faster)
            found.append(name(built))
    assert found[0] == found[2] and differing_parts(found[0], found[1]) == ["device"]


def test_weights_digest_depends_on_file_contents(tmp_path: Path) -> None:
    """File names, times and paths do not matter."""
    one, two = checkpoint("qwen3"), changed("qwen3", 1)
    moved = Path(shutil.copytree(one, tmp_path / "moved"))
    digest = weights_digest(one, "auto", 0)
    assert weights_digest(moved, "auto", 0) == digest != weights_digest(two, "auto", 0)
    patch = tmp_path / "patch"
    patch.write_bytes(b"some tensors")
    patched = weights_digest(one, "auto", 0, patch)
    patch.write_bytes(b"some Tensors")
    assert len({digest, patched, weights_digest(one, "auto", 0, patch)}) == 3
    assert weights_digest(one, "dummy", 0) != weights_digest(one, "dummy", 1)


def test_text_digest_depends_on_files_and_settings(built: BuiltRunner, tmp_path: Path) -> None:
    """Paths and weights do not matter."""
    one = Path(shutil.copytree(checkpoint("llama"), tmp_path / "one"))
    other = Path(shutil.copytree(one, tmp_path / "other"))
    model = built.config.model

    def text(folder: Path, **settings: Any) -> str:
        config = dataclasses.replace(model, model=str(folder), **settings)
        return text_digest(config, resolve_model(str(folder)))

    plain = text(one)
    (other / "model.safetensors").write_bytes(b"other weights")
    assert text(other) == plain
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    assert text(one, chat_template=str(template)) == text(one, chat_template="{{ messages }}")
    found = {plain, text(one, chat_template="{{ messages }}"), text(one, tool_call_parser="none")}
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        (other / name).write_text('{"temperature": 0.5}')
        found.add(text(other))
    assert len(found) == 6


def test_files_that_no_tokenizer_reads_keep_the_text_digest(
    built: BuiltRunner, tmp_path: Path
) -> None:
    """Broken links, directories and a trainer's data cause no errors either."""
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    config, source = built.config.model, resolve_model(str(folder))
    plain = text_digest(config, source)
    (folder / "broken.json").symlink_to(tmp_path / "nothing")
    (folder / "chat_template.json").symlink_to(tmp_path / "nothing")
    (folder / "folder.json").mkdir()
    (folder / "trainer_state.json").write_text("{}")
    values = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(values | {"note": "another"}))
    assert text_digest(config, source) == plain
    found = {plain}
    (folder / "config.json").write_text(json.dumps(values | {"eos_token_id": 7}))
    found.add(text_digest(config, source))
    (folder / "config.json").write_text(json.dumps(values | {"tokenizer_class": "Another"}))
    found.add(text_digest(config, source))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    found.add(text_digest(config, source))
    (folder / "preprocessor_config.json").write_text("{}")
    found.add(text_digest(config, source))
    assert len(found) == 5


def test_large_text_files_are_read_only_in_part(
    built: BuiltRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)  # a terabyte without blocks on the disk
    config, source = built.config.model, resolve_model(str(folder))
    before = time.process_time()
    plain = text_digest(config, source)
    assert time.process_time() - before < 10
    with (folder / "tokenizer.json").open("r+b") as file:
        file.write(b"changed")
    assert text_digest(config, source) != plain


def test_separate_tokenizer_file_changes_the_text_digest(
    built: BuiltRunner, tmp_path: Path
) -> None:
    source, found = resolve_model(str(checkpoint("llama"))), set()
    for value in range(2):
        path = tmp_path / str(value) / "tokenizer.gguf"
        path.parent.mkdir()
        write_gguf(path, {"general.architecture": "llama", "value": value}, {})
        config = dataclasses.replace(built.config.model, tokenizer=str(path))
        found.add(text_digest(config, source))
    assert len(found) == 2


def test_numerics_have_all_parts(built: BuiltRunner) -> None:
    parts = numerics_of(built, resolve_model(str(checkpoint("llama"))))
    assert {*parts, "weights"} == {*PARTS} and parts["formats"].startswith("float32, ")
    assert "equal in any batch" in parts["device"]
