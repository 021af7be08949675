"""The pieces of all parts, in the order in which they run, each a process of its own."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.gpu.context import Bench


@dataclass(frozen=True)
class Piece:
    """limit_s: the most that it may take of the part's time. module, function: what runs it."""

    name: str
    part: str
    limit_s: float
    module: str
    function: str = "run"
    is_first: bool = False  # before the limits, which take their time

    def load(self) -> Callable[[Bench], None]:
        """Return the piece's function, importing its module on the first call."""
        import importlib

        module = importlib.import_module(f"benchmarks.gpu.{self.module}")
        found: Callable[[Bench], None] = getattr(module, self.function)
        return found


# A part's pieces together may take longer than its time, so the most informative come first. The
# first four of bench fit into 480 s, and so do all others.
PIECES = (
    Piece("demo-answers", "first", 70, "first", "run_demo", is_first=True),
    Piece("qwen3-0.6b-first", "first", 120, "first", "run_small"),
    Piece("llama-8b-first", "first", 200, "first", "run_llama"),
    Piece("limits", "bench", 45, "limits"),
    Piece("llama-8b", "bench", 150, "table", "run_llama"),
    Piece("qwen3-0.6b", "bench", 110, "table", "run_small"),
    Piece("modes", "bench", 120, "table", "run_modes"),
    Piece("host", "bench", 50, "host"),
    Piece("guesses", "bench", 60, "drafts"),
    Piece("attention", "bench", 70, "attention"),
    Piece("paged", "bench", 45, "attention", "run_paged"),
    Piece("quantised", "bench", 90, "table", "run_quantised"),
    Piece("qwen3-30b-a3b", "bench", 75, "table", "run_mixture"),
    Piece("kernels", "bench", 90, "kernels"),
    Piece("quire", "peers", 120, "peers", "run_quire"),
    Piece("transformers", "peers", 240, "peers", "run_transformers"),
    Piece("generate", "peers", 120, "peers", "run_generate"),
    Piece("quire-8b", "peers", 60, "peers", "run_quire_8b"),
    Piece("generate-8b", "peers", 110, "peers", "run_generate_8b"),
    Piece("rivals", "peers", 50, "rivals"),
    Piece("vllm", "peers", 200, "peers", "run_vllm"),
    Piece("sglang", "peers", 200, "peers", "run_sglang"),
)


def chosen(part: str, names: str = "") -> list[Piece]:
    """Return a part's pieces, or only the named ones. Raises ValueError for other names."""
    mine = [piece for piece in PIECES if piece.part == part]
    requested = [name for name in names.replace(",", " ").split() if name]
    known = {piece.name for piece in mine}
    unknown = [name for name in requested if name not in known]
    if not mine or unknown:
        known_names = ", ".join(sorted(known)) or "first, bench, peers (parts)"
        raise ValueError(f"there is no {' '.join(unknown or [part])!r}; there are {known_names}.")
    return [piece for piece in mine if not requested or piece.name in requested]
