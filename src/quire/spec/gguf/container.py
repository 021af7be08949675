"""The container of GGUF files (versions 2 and 3): metadata, and the place of each tensor's bytes.

    "GGUF" | version u32 | tensors u64 | pairs u64
    pairs:    key | type u32 | value             value: number, text, or type u32 | count u64 | ...
    tensors:  name | dims u32 | dim u64 ... | kind u32 | offset u64
    padding up to a multiple of general.alignment
    data: blocks of each tensor at its offset

A split model has several such files, NAME-00001-of-00003.gguf and so on. The first one holds the
metadata of the model, each one holds a part of the tensors.

All numbers are little-endian. A text is its length (u64) and that many bytes. The file is mapped,
not read. Files are untrusted: each length is checked against the rest of the file before use.
Arrays stay in the file until they are requested.
"""

import mmap
import re
import struct
from collections import Counter
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from quire.base.errors import ModelError

MAGIC = b"GGUF"
SUFFIX = ".gguf"
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
MAX_PARTS = 1000
HEAD_BYTES = 24
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 1 << 28
MAX_TENSORS = 1 << 20
MAX_PAIRS = 1 << 16
MAX_DIMS = 4
MAX_NESTING = 4
DEFAULT_ALIGNMENT = 32
ALIGNMENTS = (8, 1 << 20)

# Number types of metadata values, with their letters for struct.
NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
TEXT, ARRAY = 8, 9


@dataclass(frozen=True)
class TensorKind:
    """A storage format: blocks of `block_size` values in `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int

    @property
    def is_float(self) -> bool:
        """Whether values are plain floats, not quantized blocks."""
        return self.block_size == 1


KINDS = {
    0: TensorKind("F32", 1, 4),
    1: TensorKind("F16", 1, 2),
    2: TensorKind("Q4_0", 32, 18),
    3: TensorKind("Q4_1", 32, 20),
    6: TensorKind("Q5_0", 32, 22),
    7: TensorKind("Q5_1", 32, 24),
    8: TensorKind("Q8_0", 32, 34),
    10: TensorKind("Q2_K", 256, 84),
    11: TensorKind("Q3_K", 256, 110),
    12: TensorKind("Q4_K", 256, 144),
    13: TensorKind("Q5_K", 256, 176),
    14: TensorKind("Q6_K", 256, 210),
    16: TensorKind("IQ2_XXS", 256, 66),
    17: TensorKind("IQ2_XS", 256, 74),
    18: TensorKind("IQ3_XXS", 256, 98),
    19: TensorKind("IQ1_S", 256, 50),
    20: TensorKind("IQ4_NL", 32, 18),
    21: TensorKind("IQ3_S", 256, 110),
    22: TensorKind("IQ2_S", 256, 82),
    23: TensorKind("IQ4_XS", 256, 136),
    29: TensorKind("IQ1_M", 256, 56),
    30: TensorKind("BF16", 1, 2),
    34: TensorKind("TQ1_0", 256, 54),
    35: TensorKind("TQ2_0", 256, 66),
    39: TensorKind("MXFP4", 32, 17),
}
# Known but unsupported kinds, named in the error message.
OTHER_KINDS = {28: "F64", 40: "NVFP4"}

Scalar = int | float | bool | str


@dataclass(frozen=True)
class ArrayEntry:
    """An array of the metadata whose size was checked, but which was not read."""

    kind: int
    count: int
    start: int


@dataclass(frozen=True)
class TensorEntry:
    """The place of a tensor in the file. `shape` is torch's; the file reverses the dimensions.
    part: index of the file among the files of a split model."""

    name: str
    shape: tuple[int, ...]
    kind: TensorKind
    start: int
    num_bytes: int
    part: int = 0


@dataclass(frozen=True)
class PartName:
    """The name of one file of a split model, such as `prefix-00001-of-00003.gguf`."""

    prefix: str
    number: int  # from 1 on
    count: int


def part_of(name: str) -> PartName | None:
    """Parse the name of a split model's file; None for any other name."""
    found = PART.fullmatch(name)
    part = None if found is None else PartName(found[1], int(found[2]), int(found[3]))
    return part if part and 1 <= part.number <= part.count <= MAX_PARTS else None


def gguf_parts(path: Path) -> list[Path]:
    """List the files of the model that a GGUF file belongs to, in order; itself if not split.

    Raises ModelError if one is missing."""
    part = part_of(path.name)
    if part is None or part.count == 1:
        return [path]
    names = (f"{part.prefix}-{n:05d}-of-{part.count:05d}" for n in range(1, part.count + 1))
    files = [path.with_name(name + path.suffix) for name in names]
    if missing := [each.name for each in files if not each.is_file()]:
        raise ModelError(
            f"{path} is one of {part.count} parts of a model, of which {', '.join(missing[:3])}"
            f" {'is' if len(missing) == 1 else 'are'} missing. Put all parts into one directory."
        )
    return files


def is_gguf(path: str | Path) -> bool:
    """Return whether this is a GGUF file, by its suffix or by its first bytes."""
    path = Path(path)
    if not path.is_file():
        return False
    if path.suffix.lower() == SUFFIX:
        return True
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


class GGUFFile:
    """An opened file, with the tensors of the other parts if it is the first part of a split model.
    Raises ModelError if it is damaged, incomplete or of another version.

    is_whole: whether to open the other parts."""

    def __init__(self, path: str | Path, is_whole: bool = True) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise ModelError(f"{path} cannot be read: {error}.") from error
        self._maps = [self._map]
        cursor = _Cursor(self._map, self.path)
        num_tensors, num_pairs = _read_start(cursor)
        self.metadata = _read_pairs(cursor, num_pairs)
        infos = [_read_tensor(cursor) for _ in range(num_tensors)]
        alignment = self.integer("general.alignment", DEFAULT_ALIGNMENT)
        minimum, maximum = ALIGNMENTS
        if not minimum <= alignment <= maximum or alignment & (alignment - 1):
            raise cursor.error(f"its alignment is {alignment}, not a power of two")
        data_start = -(-cursor.position // alignment) * alignment
        self.tensors = _placed(infos, data_start, alignment, cursor)
        if is_whole and self.integer("split.count", 1) > 1:
            self._add_parts(self.integer("split.count"))

    def _add_parts(self, count: int) -> None:
        """Add the tensors of the other parts. Raises ModelError if the parts do not match."""
        paths = gguf_parts(self.path)
        if len(paths) != count or paths[0] != self.path:
            raise ModelError(
                f"{self.path} is one of {count} parts of a model; join them"
                " (llama-gguf-split --merge FIRST_PART OUTPUT), or name the first one"
                f" NAME-00001-of-{count:05d}.gguf and so on."
            )
        for index, path in enumerate(paths[1:], 1):
            part = GGUFFile(path, is_whole=False)
            numbers = part.integer("split.count", 1), part.integer("split.no", 0)
            if numbers != (count, index):
                raise ModelError(
                    f"{path} is not part {index + 1} of {count} by its metadata, so it does not"
                    f" belong to {self.path.name}. Download the parts again."
                )
            if both := sorted(self.tensors.keys() & part.tensors.keys()):
                raise ModelError(f"{path} and an earlier part both hold the tensor {both[0]}.")
            self._maps.append(part._map)
            self.tensors |= {n: replace(t, part=index) for n, t in part.tensors.items()}
        total = self.integer("split.tensors.count", len(self.tensors))
        if len(self.tensors) != total:
            raise ModelError(
                f"the parts of {self.path} hold {len(self.tensors)} tensors, not {total}. Download"
                " them again."
            )

    def describe(self) -> str:
        """Return the number of tensors of each kind, such as `Q8_0 197, F32 113`."""
        counts = Counter(place.kind.name for place in self.tensors.values())
        return ", ".join(f"{name} {count}" for name, count in counts.most_common())

    def data(self, place: TensorEntry) -> memoryview:
        """Return a tensor's blocks, mapped."""
        return memoryview(self._maps[place.part])[place.start : place.start + place.num_bytes]

    def forget(self, place: TensorEntry) -> None:
        """Release the memory of a tensor's mapped blocks; the next access reads them again."""
        first = place.start // mmap.PAGESIZE * mmap.PAGESIZE
        self._maps[place.part].madvise(
            mmap.MADV_DONTNEED, first, place.start + place.num_bytes - first
        )

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number of the metadata.

        Raises ModelError for another type, or if absent without a default; so do the others."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def texts(self, key: str) -> list[str]:
        """Return an array of texts; empty if absent. Invalid UTF-8 is replaced."""
        place = self._array(key, "an array of texts", {TEXT})
        if place is None:
            return []
        cursor = _Cursor(self._map, self.path, place.start)
        return [cursor.text() for _ in range(place.count)]

    def numbers(self, key: str) -> list[float]:
        """Return an array of numbers; empty if absent."""
        place = self._array(key, "an array of numbers", set(NUMBERS))
        if place is None:
            return []
        return list(
            struct.unpack_from(f"<{place.count}{NUMBERS[place.kind]}", self._map, place.start)
        )

    def _value(self, key: str, default: Scalar | None) -> Scalar | ArrayEntry:
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelError(f"{self.path} lacks the metadata {key}, so it cannot be used.")
        return value

    def _array(self, key: str, rule: str, kinds: set[int]) -> ArrayEntry | None:
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, ArrayEntry) or (value.kind not in kinds and value.count):
            raise self._wrong(key, rule)
        return value

    def _wrong(self, key: str, rule: str) -> ModelError:
        value = self.metadata.get(key)
        shown = "an array" if isinstance(value, ArrayEntry) else repr(value)[:60]
        return ModelError(f"{self.path}: the metadata {key} must be {rule}, not {shown}.")


class _Cursor:
    """Reads the header from start to end, never beyond the end."""

    def __init__(self, data: mmap.mmap, path: Path, position: int = 0) -> None:
        self._data, self._path, self.position = data, path, position
        self.size = len(data)

    @property
    def left(self) -> int:
        return min(self.size, MAX_HEADER_BYTES) - self.position

    def skip(self, num_bytes: int) -> int:
        """Skip a number of bytes and return their start. Raises ModelError beyond the end."""
        start = self.position
        if num_bytes > self.left:
            reason = "its header ends too early" if self.size <= MAX_HEADER_BYTES else "too large"
            raise self.error(f"{reason} (at byte {start} it needs {num_bytes} more)")
        self.position += num_bytes
        return start

    def integer(self, letter: str) -> int:
        value: int = struct.unpack_from(
            f"<{letter}", self._data, self.skip(struct.calcsize(letter))
        )[0]
        return value

    def number(self, kind: int) -> Scalar:
        letter = NUMBERS[kind]
        start = self.skip(struct.calcsize(f"<{letter}"))
        value: Scalar = struct.unpack_from(f"<{letter}", self._data, start)[0]
        return value

    def raw_text(self) -> bytes:
        length = self.integer("Q")
        start = self.skip(length)
        return self._data[start : start + length]

    def text(self) -> str:
        return self.raw_text().decode("utf-8", errors="replace")

    def name(self) -> str:
        """Return a text that identifies something, so it must be valid UTF-8."""
        try:
            return self.raw_text().decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error("a name in it is not UTF-8") from error

    def array(self, depth: int = 0) -> ArrayEntry:
        """Skip an array after a check that the file contains all of it."""
        kind, count = self.integer("I"), self.integer("Q")
        start = self.position
        if kind in NUMBERS:
            self.skip(count * struct.calcsize(f"<{NUMBERS[kind]}"))
        elif kind == TEXT:
            self._skip_texts(count)
        elif kind == ARRAY and depth < MAX_NESTING:
            self._check_count(count)
            for _ in range(count):
                self.array(depth + 1)
        else:
            raise self.error(f"an array in it has the unknown type {kind}")
        return ArrayEntry(kind, count, start)

    def value(self) -> Scalar | ArrayEntry:
        kind = self.integer("I")
        if kind in NUMBERS:
            return self.number(kind)
        if kind == TEXT:
            return self.text()
        if kind == ARRAY:
            return self.array()
        raise self.error(f"a value in it has the unknown type {kind}")

    def error(self, reason: str) -> ModelError:
        return ModelError(
            f"{self._path} is not a valid GGUF file: {reason}. Check that its download is complete."
        )

    def _skip_texts(self, count: int) -> None:
        """Skip texts, without calls in the loop, because a vocabulary may have 150,000."""
        self._check_count(count)
        data, position, end = self._data, self.position, self.position + self.left
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if position + 8 > end:
                position = end + 1
                break
            position += 8 + unpack(data, position)[0]
        if position > end:
            raise self.error("a list of texts in it ends too early")
        self.position = position

    def _check_count(self, count: int) -> None:
        """Raise ModelError for a count too large for the file; each element takes 8 bytes."""
        if count > self.left // 8:
            raise self.error(f"it announces {count} elements where there is no room for them")


def _read_start(cursor: _Cursor) -> tuple[int, int]:
    """Read the head; return the numbers of tensors and of pairs."""
    size = cursor.left
    if size < len(MAGIC) or cursor.integer("I") != int.from_bytes(MAGIC, "little"):
        raise cursor.error("it does not begin with GGUF")
    if size < HEAD_BYTES:
        raise cursor.error(f"it ends after {size} bytes, within its head")
    version = cursor.integer("I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        problem = "it is big-endian" if swapped else f"its version is {version}"
        raise cursor.error(f"{problem}; versions 2 and 3, little-endian, are read")
    num_tensors, num_pairs = cursor.integer("Q"), cursor.integer("Q")
    if num_tensors > MAX_TENSORS or num_pairs > MAX_PAIRS:
        raise cursor.error(f"it announces {num_tensors} tensors and {num_pairs} values")
    return num_tensors, num_pairs


def _read_pairs(cursor: _Cursor, count: int) -> dict[str, Scalar | ArrayEntry]:
    metadata: dict[str, Scalar | ArrayEntry] = {}
    for _ in range(count):
        key = cursor.name()
        if key in metadata:
            raise cursor.error(f"it has the metadata {key!r} twice")
        metadata[key] = cursor.value()
    return metadata


def _read_tensor(cursor: _Cursor) -> TensorEntry:
    """Return a tensor's place, with `start` relative to the start of the data."""
    name = cursor.name()
    num_dims = cursor.integer("I")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.error(f"its tensor {name!r} has {num_dims} dimensions")
    shape = tuple(cursor.integer("Q") for _ in range(num_dims))[::-1]
    number, offset = cursor.integer("I"), cursor.integer("Q")
    if number not in KINDS:
        known = ", ".join(kind.name for kind in KINDS.values())
        raise ModelError(
            f"the tensor {name!r} is stored as {OTHER_KINDS.get(number, f'type {number}')};"
            f" supported are {known}. Take a file with another quantisation."
        )
    kind = KINDS[number]
    if prod(shape) == 0 or shape[-1] % kind.block_size:
        raise cursor.error(f"its tensor {name!r} of type {kind.name} has the shape {list(shape)}")
    num_bytes = prod(shape) // kind.block_size * kind.block_bytes
    return TensorEntry(name, shape, kind, offset, num_bytes)


def _placed(
    infos: list[TensorEntry], data_start: int, alignment: int, cursor: _Cursor
) -> dict[str, TensorEntry]:
    """Return the tensors by name, with `start` relative to the start of the file."""
    tensors: dict[str, TensorEntry] = {}
    for info in infos:
        start = data_start + info.start
        if info.name in tensors:
            raise cursor.error(f"it has the tensor {info.name!r} twice")
        if info.start % alignment:
            raise cursor.error(
                f"its tensor {info.name!r} does not begin at a multiple of {alignment}"
            )
        if start + info.num_bytes > cursor.size:
            missing = start + info.num_bytes - cursor.size
            raise cursor.error(
                f"its tensor {info.name!r} ends {missing} bytes after the end of the file"
            )
        tensors[info.name] = TensorEntry(info.name, info.shape, info.kind, start, info.num_bytes)
    if sum(info.num_bytes for info in infos) > cursor.size:
        raise cursor.error("its tensors overlap")
    return tensors
