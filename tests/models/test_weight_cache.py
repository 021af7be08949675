"""Packed weights from the cache have the same bits, and a damaged file is never used."""

import errno
import hashlib
import json
import logging
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.base.errors import ModelError
from quire.base.settings.config import ModelConfig
from quire.models.checkpoint.files import weight_files
from quire.models.checkpoint.formats import AS_THEY_ARE, WeightFormats, weight_formats
from quire.models.load.assembly import all_weights, empty_model
from quire.models.load.cache_files import (
    HEADER,
    MAGIC,
    PAGE_BYTES,
    UNFINISHED,
    WEIGHTS,
    WeightCache,
    make_room,
    weight_cache,
)
from quire.models.load.loading import LoadOptions, load_model
from quire.models.load.packing import model_bytes
from quire.models.load.weight_cache import entry_of, indexed
from quire.models.parts.layers import Linear
from quire.ops.host.native import core
from quire.ops.host.pages import aligned
from quire.ops.weights.formats import variants
from quire.spec.model_spec import load_spec
from tests.support.kernels.kernel_speeds import keep_figures, own_figures
from tests.support.models.checkpoints import Checkpoint, random_tokens, write_checkpoint
from tests.support.models.gguf_writer import Q8_0, convert
from tests.support.models.paged_forward import CPU, run_paged

if core() is None:
    pytest.skip("the C++ core is not built", allow_module_level=True)

INT8, INT4 = (weight_formats(ModelConfig(quantization=name)) for name in ("int8", "int4"))
INT4_HEAD = WeightFormats(INT4.layers, INT4.layers)
TOKENS = random_tokens(9)


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(tmp_path / "cache")


@pytest.fixture
def llama(tmp_path: Path) -> Checkpoint:
    return write_checkpoint(tmp_path / "llama", "llama")


def load(
    path: Path | Checkpoint, cache: WeightCache | None, formats: WeightFormats = INT8, **more: Any
) -> torch.nn.Module:
    folder = path.directory if isinstance(path, Checkpoint) else path
    dtype, progress = more.pop("dtype", torch.bfloat16), more.pop("progress", None)
    options = LoadOptions(formats=formats, cache=cache, **more)
    return load_model(folder, load_spec(folder), dtype, CPU, options, progress)


def bits(model: torch.nn.Module) -> dict[str, bytes]:
    """Return the bytes of all weights, by name."""
    found = {}
    for name, owner, own in all_weights(model):
        weight = getattr(owner, own)
        found[name] = weight.data.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return found


def files(cache: WeightCache, suffix: str = WEIGHTS) -> list[Path]:
    return sorted(cache.directory.glob(f"*{suffix}"))


def forbid_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("packed again")

    monkeypatch.setattr("quire.models.load.assembly.pack_modules", refuse)


@pytest.mark.parametrize("formats", [AS_THEY_ARE, INT8, INT4, INT4_HEAD], ids=str)
@pytest.mark.parametrize("variant", ["llama_biases", "qwen3_tied", "gpt2", "opt_350m"])
def test_the_next_start_loads_the_same_weights(
    variant: str,
    formats: WeightFormats,
    tmp_path: Path,
    cache: WeightCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = write_checkpoint(tmp_path / variant, variant)
    first = load(checkpoint, cache, formats)
    forbid_packing(monkeypatch)
    seen: list[tuple[int, int]] = []
    second = load(checkpoint, cache, formats, progress=lambda *at: seen.append(at))
    assert bits(first) == bits(second)
    assert model_bytes(first) == model_bytes(second)
    assert seen[-1][0] == seen[-1][1] > 0
    for layer in second.modules():
        if isinstance(layer, Linear):
            assert layer.weight.data.data_ptr() % 64 == 0
    logits = [
        run_paged(model, checkpoint.spec, TOKENS, [[9]], dtype=torch.bfloat16)[0]
        for model in (first, second)
    ]
    assert torch.equal(*logits)


def test_gguf_and_dummy_weights_are_cached(
    llama: Checkpoint, tmp_path: Path, cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = convert(llama.directory, tmp_path / "model.gguf", Q8_0)
    first = [load(path, cache, AS_THEY_ARE), load(llama, cache, load_format="dummy", seed=3)]
    assert len(files(cache)) == 2
    forbid_packing(monkeypatch)
    again = [load(path, cache, AS_THEY_ARE), load(llama, cache, load_format="dummy", seed=3)]
    assert [bits(model) for model in first] == [bits(model) for model in again]


def test_each_format_dtype_and_seed_has_its_own_file(llama: Checkpoint, cache: WeightCache) -> None:
    for formats in (INT8, INT4, AS_THEY_ARE):
        for dtype in (torch.float32, torch.bfloat16):
            load(llama, cache, formats, dtype=dtype)
    for seed in (1, 2):
        load(llama, cache, load_format="dummy", seed=seed)
    assert len(files(cache)) == 8
    load(llama, cache, AS_THEY_ARE, dtype=torch.float64)  # the core does not pack it
    assert len(files(cache)) == 8


def test_each_instruction_set_has_its_own_file(
    llama: Checkpoint, cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(llama, cache)
    monkeypatch.setenv("QUIRE_CPU_VARIANT", "portable")
    load(llama, cache)
    assert len(files(cache)) == 2


@pytest.mark.skipif(len(variants()) < 2, reason="this CPU runs one instruction set")
def test_measured_speeds_only_affect_formats_in_use(
    llama: Checkpoint, cache: WeightCache, tmp_path: Path
) -> None:
    with own_figures(tmp_path / "home"):
        for faster in ({}, {"int8": variants()[0]}, {"bfloat16": variants()[0]}):
            keep_figures(faster)
            wanted = bits(load(llama, cache, AS_THEY_ARE))
            assert bits(load(llama, cache, AS_THEY_ARE)) == wanted
        assert len(files(cache)) == 2
        for faster in ({}, {"int8": variants()[0]}, {"float16": variants()[0]}):
            keep_figures(faster)
            load(llama, cache, INT8)
        assert len(files(cache)) == 4


@pytest.mark.parametrize("keeps_time", [False, True])
def test_a_changed_checkpoint_is_read_again(
    llama: Checkpoint, cache: WeightCache, keeps_time: bool
) -> None:
    """Also if its size and its modification time are the same."""
    before = bits(load(llama, cache))
    (file,) = weight_files(llama.directory)
    facts, raw = file.stat(), bytearray(file.read_bytes())
    half = len(raw) // 2
    raw[half:] = bytes(len(raw) - half)
    file.write_bytes(raw)
    if keeps_time:
        os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert bits(load(llama, cache)) != before
    assert len(files(cache)) == 2


def test_each_config_has_its_own_entry(llama: Checkpoint, cache: WeightCache) -> None:
    """Also if the only field that differs affects no weight."""
    load(llama, cache)
    path = llama.directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.5}))
    load(llama, cache)
    assert len(files(cache)) == 2


def test_a_deleted_checkpoint_is_reported(llama: Checkpoint, cache: WeightCache) -> None:
    load(llama, cache)
    (llama.directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no \\*.safetensors"):
        load(llama, cache)


# ---- damaged and foreign files ---------------------------------------------------------------


def flipped(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


DAMAGES = {
    "empty": lambda raw: b"",
    "short header": lambda raw: raw[:20],
    "no data": lambda raw: raw[:4096],
    "one byte less": lambda raw: raw[:-1],
    "one byte more": lambda raw: raw + b"x",
    "another magic": lambda raw: flipped(raw, 0),
    "another start of data": lambda raw: flipped(raw, 10),
    "another size": lambda raw: flipped(raw, 17),
    "a huge index": lambda raw: raw[:28] + b"\xff" + raw[29:],
    "another digest": lambda raw: flipped(raw, 40),
    "another index": lambda raw: flipped(raw, 100),
    "text": lambda raw: b"nonsense" * 1000,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_reported_and_written_again(
    damage: str, llama: Checkpoint, cache: WeightCache, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = bits(load(llama, cache))
    (file,) = files(cache)
    raw = file.read_bytes()
    file.write_bytes(DAMAGES[damage](raw))
    with caplog.at_level(logging.WARNING, "quire"):
        assert bits(load(llama, cache)) == wanted
    assert f"{file} is not used" in caplog.text
    assert file.read_bytes() == raw
    assert files(cache, UNFINISHED) == []


def test_a_file_of_other_weights_is_not_used(llama: Checkpoint, cache: WeightCache) -> None:
    """Even under the right name."""
    wanted = bits(load(llama, cache))
    (file,) = files(cache)
    load(llama, cache, INT4)
    (other,) = set(files(cache)) - {file}
    shutil.copy(other, file)
    assert bits(load(llama, cache)) == wanted


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 1 << 40},
        {"offset": -64},
        {"offset": 1},
        {"nbytes": 1 << 62},
        {"nbytes": 0},
        {"names": []},
        {"names": ["head.weight", "norm.weight"]},
        {"names": ["no.such"]},
        {"numbers": [3, 0, 1 << 60, 1 << 60, 32]},
        {"numbers": [99, 0, 97, 32, 32]},
        {"numbers": [3, 99, 97, 32, 128]},
        {"numbers": [3, 3, 97, 32, 7]},
        {"numbers": "text"},
        {"dtype": "nothing"},
        {"dtype": "float64"},
    ],
    ids=str,
)
def test_a_false_index_is_not_used(
    change: dict[str, Any],
    llama: Checkpoint,
    cache: WeightCache,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its digest is right, so only its contents are wrong."""
    index, pieces = indexed(load(llama, None))
    offsets = [entry["offset"] for entry in index]
    num_bytes = max(entry["offset"] + entry["nbytes"] for entry in index)
    kind = "dtype" if "dtype" in change else "numbers"
    next(entry for entry in index if kind in entry).update(change)
    entry = entry_of(cache, empty_model(llama.spec, torch.bfloat16, CPU), 0, [], 0, "x")
    assert entry is not None
    text = json.dumps({"key": entry.key, "weights": index}).encode()
    start, digest = aligned(HEADER.size + len(text), PAGE_BYTES), hashlib.sha256(text).digest()
    cache.directory.mkdir()
    with entry.path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, start, num_bytes, len(text), digest) + text)
        for offset, piece in zip(offsets, pieces, strict=True):
            file.seek(start + offset)
            file.write(piece.tobytes())
    assert not entry.restore(empty_model(llama.spec, torch.bfloat16, CPU))
    assert "is not used" in caplog.text


def test_damage_before_the_data_leaves_the_weights_right(
    llama: Checkpoint, cache: WeightCache
) -> None:
    wanted = bits(load(llama, cache))
    (file,) = files(cache)
    raw, numbers = file.read_bytes(), random.Random(5)
    for _ in range(40):
        damaged = bytearray(raw)
        damaged[numbers.randrange(4096)] = numbers.randrange(256)
        file.write_bytes(damaged)
        assert bits(load(llama, cache)) == wanted


# ---- failures of the cache --------------------------------------------------------------------


def test_a_cache_directory_that_cannot_be_made_is_logged(
    llama: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no directory")
    load(llama, WeightCache(tmp_path / "file" / "cache"))
    assert "weights: not cached for the next start" in caplog.text


def test_a_full_disk_leaves_no_file(
    llama: Checkpoint,
    cache: WeightCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("quire.models.load.cache_files.os.write", full)
    load(llama, cache)
    assert "No space left on device" in caplog.text
    assert list(cache.directory.iterdir()) == []


def test_short_writes_are_continued(
    llama: Checkpoint, cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(
        "quire.models.load.cache_files.os.write", lambda file, data: write(file, data[:1000])
    )
    monkeypatch.setattr("quire.models.load.cache_files.WRITTEN_AT_ONCE", 4099)
    wanted = bits(load(llama, cache))
    forbid_packing(monkeypatch)
    assert bits(load(llama, cache)) == wanted


def test_concurrent_starts_write_one_valid_file(llama: Checkpoint, cache: WeightCache) -> None:
    model = load(llama, None)
    wanted, ready = bits(model), threading.Barrier(4)
    empty = [empty_model(llama.spec, torch.bfloat16, CPU) for _ in range(4)]
    entries = [entry_of(cache, each, 0, weight_files(llama.directory), 0, "x") for each in empty]
    found: list[bool] = []

    def start(index: int) -> None:
        entry = entries[index]
        assert entry is not None
        ready.wait()
        for _ in range(5):
            entry.store(model)
            found.append(entry.restore(empty_model(llama.spec, torch.bfloat16, CPU)))

    threads = [threading.Thread(target=start, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(files(cache)) == 1 and len(found) == 20
    assert entries[0] is not None and entries[0].restore(empty[0])
    assert bits(empty[0]) == wanted


def write_entry(directory: Path, name: str, size: int, used_at: int) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}{WEIGHTS}"
    path.write_bytes(bytes(size))
    os.utime(path, (used_at, used_at))
    return path


def test_the_least_recently_used_files_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.models.load.cache_files.MAX_BYTES", 1000)
    old, older, new = (
        write_entry(tmp_path, name, 300, at) for name, at in (("b", 2), ("c", 1), ("a", 3))
    )
    unfinished = tmp_path / f"x{UNFINISHED}"
    unfinished.write_bytes(b"left by a process that died")
    assert not make_room(tmp_path, 1001, tmp_path / "x")
    assert old.exists() and older.exists() and new.exists() and not unfinished.exists()
    assert make_room(tmp_path, 100, tmp_path / "x") and older.exists()
    assert make_room(tmp_path, 700, new) and not older.exists()
    assert old.exists() and new.exists()
    assert make_room(tmp_path, 701, tmp_path / "x")
    assert not old.exists() and not new.exists()


def test_files_in_use_are_not_removed(
    llama: Checkpoint, cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(llama, cache)
    using = load(llama, cache)
    (file,) = files(cache)
    monkeypatch.setattr("quire.models.load.cache_files.MAX_BYTES", file.stat().st_size)
    assert not make_room(cache.directory, 100, cache.directory / "x")
    assert file.exists()
    load(llama, cache, INT4)
    assert files(cache) == [file]
    del using
    assert make_room(cache.directory, 100, cache.directory / "x")
    assert not file.exists()


def test_loading_a_file_updates_its_time_of_use(llama: Checkpoint, cache: WeightCache) -> None:
    load(llama, cache)
    (file,) = files(cache)
    os.utime(file, (1, 1))
    load(llama, cache)
    assert file.stat().st_mtime > 1


# ---- the setting -------------------------------------------------------------------------------


def test_the_setting_chooses_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert weight_cache("off") is None
    found = weight_cache("auto")
    assert found is not None and found.directory == tmp_path / "quire" / "weights"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somewhere")
    assert weight_cache("auto").directory == Path("/somewhere/.cache/quire/weights")
    assert weight_cache("~/mine") == WeightCache(Path("/somewhere/mine"))


def test_small_and_dummy_models_are_not_cached_by_default(
    llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    automatic = weight_cache("auto")
    load(llama, automatic)
    assert not (tmp_path / "quire").exists()
    monkeypatch.setattr("quire.models.load.cache_files.MIN_BYTES", 1000)
    load(llama, weight_cache("auto"), load_format="dummy")
    assert not (tmp_path / "quire").exists()
    load(llama, weight_cache("auto"))
    assert len(files(automatic)) == 1
