"""The container of GGUF files: values are read, and damage causes only a ModelError.

Covers `spec/gguf/metadata.py` as well.
"""

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.errors import ModelError
from quire.spec.gguf.container import GGUFFile, is_gguf
from tests.support.models.gguf_writer import F32, Q8_0, Tensor, write_gguf

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "a.count": 7,
    "a.below": -3,
    "a.share": 0.5,
    "a.flag": True,
    "a.texts": ["one", "", "drei – 三"],
    "a.numbers": [1, 2, 3],
    "a.floats": [0.25, -1.0],
    "a.empty": [],
}
TENSORS = {
    "vector": Tensor(F32, (3,), struct.pack("<3f", 1, 2, 3)),
    "matrix": Tensor(Q8_0, (2, 64), bytes(range(136))),
}
U32, TEXT, ARRAY = 4, 8, 9


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(num_tensors: int = 0, num_pairs: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs)


def test_metadata_of_every_type_is_read(path: Path) -> None:
    file = GGUFFile(write_gguf(path, METADATA, TENSORS))
    assert file.text("general.architecture") == "llama"
    assert (file.integer("a.count"), file.integer("a.below")) == (7, -3)
    assert (file.number("a.share"), file.number("a.count")) == (0.5, 7.0)
    assert file.boolean("a.flag") is True
    assert file.texts("a.texts") == METADATA["a.texts"]
    assert file.numbers("a.numbers") == [1, 2, 3]
    assert file.numbers("a.floats") == [0.25, -1.0]
    assert file.texts("a.empty") == file.numbers("a.empty") == file.texts("absent") == []
    assert (file.integer("absent", 5), file.text("absent", "x")) == (5, "x")


def test_numbers_of_every_width_are_read(path: Path) -> None:
    values = {
        0: 200,
        1: -5,
        2: 60000,
        3: -300,
        4: 4_000_000_000,
        5: -7,
        10: 1 << 60,
        11: -(1 << 60),
    }
    letters = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 10: "Q", 11: "q"}
    raw = header(num_pairs=len(values) + 2)
    for kind, value in values.items():
        raw += text(b"%d" % kind) + struct.pack(f"<I{letters[kind]}", kind, value)
    raw += text(b"12") + struct.pack("<Id", 12, 0.1)
    # Nested arrays are skipped.
    raw += text(b"nested") + struct.pack("<IIQ", ARRAY, ARRAY, 2)
    raw += struct.pack("<IQ2B", 0, 2, 1, 2) + struct.pack("<IQ", TEXT, 1) + text(b"x")
    path.write_bytes(raw)
    file = GGUFFile(path)
    assert {kind: file.integer(str(kind)) for kind in values} == values
    assert file.number("12") == 0.1


@pytest.mark.parametrize("alignment", [32, 64, 4096])
@pytest.mark.parametrize("version", [2, 3])
def test_tensor_data_is_read_at_its_offset(path: Path, version: int, alignment: int) -> None:
    metadata = METADATA | {"general.alignment": alignment}
    file = GGUFFile(write_gguf(path, metadata, TENSORS, version, alignment))
    for name, tensor in TENSORS.items():
        place = file.tensors[name]
        assert (place.shape, place.num_bytes) == (tensor.shape, len(tensor.data))
        assert bytes(file.data(place)) == tensor.data
        file.forget(place)
        assert bytes(file.data(place)) == tensor.data


def test_files_written_by_the_gguf_package_are_read(path: Path) -> None:
    """Skipped unless the package is installed (`pip install gguf`)."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["a", "b"])
    writer.add_token_scores([0.5, -1.0])
    writer.add_add_bos_token(True)
    writer.add_rope_freq_base(500000.0)
    writer.add_custom_alignment(64)
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("matrix", values)
    writer.add_tensor("vector", values[0].astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    assert file.texts("tokenizer.ggml.tokens") == ["a", "b"]
    assert file.numbers("tokenizer.ggml.scores") == [0.5, -1.0]
    assert file.boolean("tokenizer.ggml.add_bos_token") is True
    assert file.number("llama.rope.freq_base") == 500000.0
    matrix, vector = file.tensors["matrix"], file.tensors["vector"]
    assert (matrix.shape, bytes(file.data(matrix))) == ((3, 4), values.tobytes())
    assert (vector.shape, vector.kind.name) == ((4,), "F16")
    assert file.describe() == "F32 1, F16 1"


def test_is_gguf_checks_magic_bytes_and_suffix(tmp_path: Path, path: Path) -> None:
    write_gguf(path, {})
    blob = path.rename(tmp_path / "sha256-0123")
    empty = tmp_path / "empty.GGUF"
    empty.touch()
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"GGU")
    assert [is_gguf(p) for p in (blob, empty, other, tmp_path, tmp_path / "no.gguf")] == [
        True, True, False, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("getter", "message"),
    [
        (lambda f: f.integer("a.share"), "a.share must be a whole number, not 0.5"),
        (lambda f: f.integer("a.flag"), "a.flag must be a whole number, not True"),
        (lambda f: f.number("a.texts"), "a.texts must be a number, not an array"),
        (lambda f: f.text("a.count"), "a.count must be a text, not 7"),
        (lambda f: f.boolean("a.count"), "a.count must be true or false, not 7"),
        (lambda f: f.texts("a.numbers"), "a.numbers must be an array of texts, not an array"),
        (lambda f: f.numbers("a.texts"), "a.texts must be an array of numbers"),
        (lambda f: f.texts("a.count"), "a.count must be an array of texts, not 7"),
        (lambda f: f.integer("absent"), "lacks the metadata absent"),
    ],
)
def test_metadata_of_the_wrong_type_is_rejected(path: Path, getter: Any, message: str) -> None:
    file = GGUFFile(write_gguf(path, METADATA))
    with pytest.raises(ModelError, match=message):
        getter(file)


HUGE = (1 << 64) - 1
DAMAGED = {
    "empty": (b"", "cannot be read"),
    "short": (b"GGUF", "ends after 4 bytes, within its head"),
    "other": (b"\x89PNG" + bytes(40), "does not begin with GGUF"),
    "version 1": (header(version=1), "its version is 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "it is big-endian"),
    "tensors": (header(num_tensors=HUGE), "announces 18446744073709551615 tensors"),
    "pairs": (header(num_pairs=HUGE), "announces 0 tensors and 18446744073709551615 values"),
    "key": (header(num_pairs=1) + struct.pack("<Q", HUGE), "ends too early"),
    "key text": (header(num_pairs=1) + text(b"\xff\xfe") + struct.pack("<II", U32, 1), "not UTF-8"),
    "value": (header(num_pairs=1) + text(b"k") + struct.pack("<IQ", TEXT, 1 << 40), "too early"),
    "type": (header(num_pairs=1) + text(b"k") + struct.pack("<I", 99), "unknown type 99"),
    "array type": (
        header(num_pairs=1) + text(b"k") + struct.pack("<IIQ", ARRAY, 77, 1),
        "unknown type 77",
    ),
    "numbers": (
        header(num_pairs=1) + text(b"k") + struct.pack("<IIQ", ARRAY, U32, 1 << 62),
        "too early",
    ),
    "texts": (
        header(num_pairs=1) + text(b"k") + struct.pack("<IIQ", ARRAY, TEXT, 1 << 61),
        "announces 2305843009213693952 elements",
    ),
    "text in texts": (
        header(num_pairs=1) + text(b"k") + struct.pack("<IIQQ", ARRAY, TEXT, 1, HUGE),
        "ends too early",
    ),
    "last text": (
        header(num_pairs=1)
        + text(b"k")
        + struct.pack("<IIQ", ARRAY, TEXT, 2)
        + text(b"12345678")
        + b"1234",
        "ends too early",
    ),
    "nesting": (
        header(num_pairs=1) + text(b"k") + struct.pack("<I", ARRAY) + 50 * struct.pack("<IQ", 9, 1),
        "unknown type 9",
    ),
    "twice": (
        header(num_pairs=2) + (text(b"k") + struct.pack("<II", U32, 1)) * 2,
        "metadata 'k' twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_headers_are_rejected(path: Path, name: str) -> None:
    raw, message = DAMAGED[name]
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=message):
        GGUFFile(path)


def tensor_info(
    dims: tuple[int, ...] = (4,), kind: int = F32, offset: int = 0, name: bytes = b"t"
) -> bytes:
    return (
        text(name)
        + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        + struct.pack("<IQ", kind, offset)
    )


DAMAGED_TENSORS = {
    "many dims": (tensor_info((1,) * 5), "has 5 dimensions"),
    "no dims": (tensor_info(()), "has 0 dimensions"),
    "no values": (tensor_info((4, 0)), r"has the shape \[0, 4\]"),
    "half a block": (tensor_info((40,), Q8_0), r"of type Q8_0 has the shape \[40\]"),
    "huge": (tensor_info((1 << 63, 1 << 63, 1 << 63)), "bytes after the end of the file"),
    "far": (tensor_info(offset=1 << 63), "bytes after the end of the file"),
    "crooked": (tensor_info(offset=4), "does not begin at a multiple of 32"),
    "unknown": (tensor_info(kind=40), "stored as NVFP4; supported are F32, F16"),
    "removed": (tensor_info(kind=4), "stored as type 4; supported are F32, F16"),
}


@pytest.mark.parametrize("name", DAMAGED_TENSORS)
def test_damaged_tensors_are_rejected(path: Path, name: str) -> None:
    info, message = DAMAGED_TENSORS[name]
    path.write_bytes(header(num_tensors=1) + info + bytes(200))
    with pytest.raises(ModelError, match=message):
        GGUFFile(path)


def test_duplicate_tensor_names_are_rejected(path: Path) -> None:
    path.write_bytes(header(num_tensors=2) + tensor_info() * 2 + bytes(200))
    with pytest.raises(ModelError, match="tensor 't' twice"):
        GGUFFile(path)


def test_overlapping_tensors_are_rejected(path: Path) -> None:
    infos = tensor_info((60,)) + tensor_info((60,), name=b"u")
    path.write_bytes(header(num_tensors=2) + infos + bytes(270))
    with pytest.raises(ModelError, match="its tensors overlap"):
        GGUFFile(path)


@pytest.mark.parametrize("alignment", [0, 4, 48, 1 << 31])
def test_alignment_must_be_a_power_of_two(path: Path, alignment: int) -> None:
    write_gguf(path, {"general.alignment": alignment})
    with pytest.raises(ModelError, match=f"its alignment is {alignment}"):
        GGUFFile(path)


def test_truncated_files_are_rejected(path: Path) -> None:
    whole = write_gguf(path, METADATA, TENSORS).read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            GGUFFile(path)


def test_files_with_random_damage_are_read_or_rejected(path: Path) -> None:
    whole = write_gguf(path, METADATA, TENSORS).read_bytes()
    numbers = random.Random(11)
    num_read = 0
    for _ in range(1500):
        raw = bytearray(whole)
        for _ in range(numbers.choice((1, 1, 2, 8))):
            raw[numbers.randrange(len(raw))] = numbers.choice((0, 1, 127, 128, 255))
        path.write_bytes(raw)
        try:
            file = GGUFFile(path)
            for key in file.metadata:
                for getter in (file.texts, file.numbers):
                    try:
                        getter(key)
                    except ModelError:
                        continue
            for place in file.tensors.values():
                assert len(file.data(place)) == place.num_bytes
            num_read += 1
        except ModelError:
            continue
    assert 50 < num_read < 1450
