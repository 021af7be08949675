"""Choose one of several GGUF files of a model: by name, or by size and quality for this machine.

Input: file names with sizes. Output: the chosen files (several if the model is split) and the
reason, in one sentence for the user.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from quire.base.errors import ModelError, ModelNotFound
from quire.spec.gguf.container import KINDS, SUFFIX, part_of

# Bits per weight by the first letters of a quantisation, from the formats' block sizes.
BITS = {
    "F32": 32.0, "BF16": 16.0, "F16": 16.0, "Q8": 8.5, "Q6": 6.6, "Q5": 5.6, "Q4": 4.8,
    "MXFP4": 4.3, "IQ4": 4.3, "Q3": 3.8, "IQ3": 3.4, "Q2": 3.0, "IQ2": 2.5, "TQ2": 2.1,
    "IQ1": 1.8, "TQ1": 1.7,
}  # fmt: skip
# Bits per weight in memory of formats that the core multiplies as integers (models/gguf/repacked).
BITS_IN_MEMORY = {"IQ4": 9.0, "IQ3": 9.0, "IQ2": 9.5, "IQ1": 9.5, "TQ2": 4.5, "TQ1": 4.5}
# Letters after the bits, best first; an empty text stands for a name without any.
VARIANTS = ("XL", "L", "M", "K", "", "NL", "S", "XS", "XXS", "1", "0")
QUANTISATION = re.compile(
    r"(?:^|[-._])((?:I?Q\d|TQ\d|B?F16|F32|MXFP4)(?:_(?:K|NL|XXS|XS|XL|S|M|L|[01]))*)(?=[-._]|$)",
    re.IGNORECASE,
)
OTHER_FILES = ("mmproj", "imatrix", "-draft-")  # parts of names of GGUF files without a model
BEST, USUAL = "Q8_0", "Q4_K_M"  # practically without loss; little loss at a small size
SMALL, MAX_SHARE = 0.25, 0.7  # shares of the memory
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class GGUFCandidate:
    """One model among GGUF files. quantisation: as in the file's name; empty if it has none.
    files: the parts of the model in order, usually one."""

    quantisation: str
    files: tuple[str, ...]
    num_bytes: int

    @property
    def label(self) -> str:
        """The quantisation, or the file's name without its ending."""
        return self.quantisation or PurePosixPath(self.files[0]).stem

    @property
    def is_supported(self) -> bool:
        """Whether quire reads the formats that this quantisation is made of, as far as known."""
        stem = _stem(self.quantisation)
        return not stem or any(kind.name.startswith(stem) for kind in KINDS.values())

    @property
    def memory_bytes(self) -> int:
        """The bytes of the weights once loaded, as far as the name shows."""
        stem = _stem(self.quantisation)
        if stem not in BITS_IN_MEMORY:
            return self.num_bytes
        return int(self.num_bytes * BITS_IN_MEMORY[stem] / BITS[stem])

    @property
    def quality(self) -> tuple[float, int]:
        """A key that sorts quantisations by quality: larger is better."""
        last = self.quantisation.rpartition("_")[2] if "_" in self.quantisation else ""
        rank = VARIANTS.index(last) if last in VARIANTS else len(VARIANTS)
        return BITS.get(_stem(self.quantisation), 0.0), -rank


@dataclass(frozen=True)
class Choice:
    """The chosen candidate and the reason."""

    candidate: GGUFCandidate
    reason: str


def candidates_of(files: Mapping[str, int]) -> list[GGUFCandidate]:
    """Return the models among files (name -> bytes), best quality first. Skip incomplete split
    models and files without a language model."""
    groups: dict[tuple[str, int], dict[int, str]] = {}
    for name in files:
        is_other = any(word in name.lower() for word in OTHER_FILES)
        if not name.lower().endswith(SUFFIX) or is_other:
            continue
        part = part_of(PurePosixPath(name).name)
        prefix = name if part is None else str(PurePosixPath(name).with_name(part.prefix))
        number, count = (1, 1) if part is None else (part.number, part.count)
        groups.setdefault((prefix, count), {})[number] = name
    found = []
    for (prefix, count), parts in groups.items():
        if len(parts) == count:
            names = tuple(parts[number] for number in sorted(parts))
            size = sum(files[name] for name in names)
            found.append(GGUFCandidate(quantisation_of(prefix), names, size))
    # Of two files of one quantisation the plainer name is first.
    return sorted(found, key=lambda c: (*(-x for x in c.quality), len(c.files[0]), c.files))


def quantisation_of(name: str) -> str:
    """Return the last quantisation in a file's name, in upper case; empty without one."""
    base = PurePosixPath(name).name
    stem = base[: -len(SUFFIX)] if base.lower().endswith(SUFFIX) else base
    found = QUANTISATION.findall(stem)
    return str(found[-1]).upper() if found else ""


def named_choice(candidates: Sequence[GGUFCandidate], tag: str, where: str) -> Choice:
    """Return the candidate of a quantisation or a file's name. Raises ModelNotFound."""
    requested = tag.lower().removesuffix(SUFFIX)
    for each in candidates:
        names = {each.quantisation.lower(), *(PurePosixPath(f).stem.lower() for f in each.files)}
        if requested in names:
            return Choice(each, f"{each.label} ({in_units(each.num_bytes)}), as requested")
    raise ModelNotFound(f"{where} has no GGUF file {tag!r}; it has {listed(candidates)}.")


def best_choice(candidates: Sequence[GGUFCandidate], memory_bytes: int, where: str) -> Choice:
    """Return the best candidate for a machine with this memory.

    Up to a quarter of the memory, quality comes first, from Q8_0 down to Q4_K_M. Larger models get
    the best quantisation, up to Q4_K_M, that takes at most 70 % of the memory. They are slow with
    more bits, and the KV cache needs room. Raises ModelError if none is supported or none fits."""
    supported = [each for each in candidates if each.is_supported]
    if not supported:
        raise ModelError(f"{where} has no GGUF file that quire reads; it has {listed(candidates)}.")
    best, usual = (GGUFCandidate(name, (), 0).quality for name in (BEST, USUAL))
    for each in supported:
        if usual <= each.quality <= best and each.memory_bytes <= SMALL * memory_bytes:
            return Choice(each, _reason(each, f"takes less than a quarter of {_of(memory_bytes)}"))
    fitting = [each for each in supported if each.memory_bytes <= MAX_SHARE * memory_bytes]
    if not fitting:
        smallest = min(supported, key=lambda each: each.memory_bytes)
        raise ModelError(
            f"no GGUF file of {where} fits in 70 % of {_of(memory_bytes)}: the smallest,"
            f" {smallest.label}, needs {in_units(smallest.memory_bytes)}. Choose a smaller model,"
            f" or append :{smallest.label} to the name to try it."
        )
    for each in fitting:
        if each.quality <= usual:
            return Choice(each, _reason(each, f"up to {USUAL} fits in {_of(memory_bytes)}"))
    smallest = fitting[-1]
    text = f"the smallest of {len(candidates)} files; it fits in {_of(memory_bytes)}"
    return Choice(smallest, f"{smallest.label} ({in_units(smallest.num_bytes)}): {text}")


def _reason(chosen: GGUFCandidate, rest: str) -> str:
    return f"{chosen.label} ({in_units(chosen.num_bytes)}): the best quality that {rest}"


def _of(memory_bytes: int) -> str:
    return f"this machine's {in_units(memory_bytes)} of memory"


def _stem(quantisation: str) -> str:
    return quantisation.partition("_")[0]


def listed(candidates: Sequence[GGUFCandidate]) -> str:
    """List candidates with their sizes, for a message."""
    shown = [f"{each.label} ({in_units(each.num_bytes)})" for each in candidates]
    return ", ".join(shown) or "none"


def in_units(num_bytes: int) -> str:
    """Write a number of bytes with a decimal unit, as the hub does."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def machine_memory_bytes() -> int:
    """Return the memory of this machine, or of its control group if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = CGROUP_LIMIT.read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total
