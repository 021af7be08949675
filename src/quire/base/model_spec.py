"""A model's shape, read from its Hugging Face config.json or its GGUF file, without torch.

`ModelSpec` holds what memory sizing, the scheduler and the layers need; `cache_groups` says what
each attention layer caches (design: "Cache groups"). Numbers that only one architecture needs are
read from `raw` by that architecture's file.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.base.errors import ModelError
from quire.base.gguf import SUFFIX, GGUFFile, is_gguf
from quire.base.gguf_config import gguf_config

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class CacheGroup:
    """Layers that cache the same kind of thing and so share one block table per sequence.

    kind: `full` keeps every token, `window` keeps the last `window` tokens.
    """

    kind: str
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None = None

    def block_bytes(self, block_size: int, dtype_bytes: int) -> int:
        """Bytes of one block: K and V of `block_size` tokens in all layers of the group."""
        return 2 * len(self.layers) * self.num_kv_heads * self.head_dim * dtype_bytes * block_size

    def stored_block_bytes(self, block_size: int, dtype_bytes: int, kv_format: str) -> int:
        """The same of keys and values that are stored in a format: `auto` is the model's dtype, of
        so many bytes, `int8` has a float32 scale with each token's vector, `fp8` has none."""
        if kv_format == "int8":
            scales = self.block_bytes(block_size, 4) // self.head_dim
            return self.block_bytes(block_size, 1) + scales
        if kv_format == "fp8":
            return self.block_bytes(block_size, 1)
        return self.block_bytes(block_size, dtype_bytes)


@dataclass(frozen=True)
class ModelSpec:
    """Numbers of one decoder model. Sizes are counts of elements."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    dtype: str
    tie_embeddings: bool
    layer_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    raw: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """One group per distinct window, the full group first."""
        windows = sorted(set(self.layer_windows), key=lambda w: (w is not None, w or 0))
        return tuple(
            CacheGroup(
                kind="full" if window is None else "window",
                layers=tuple(i for i, w in enumerate(self.layer_windows) if w == window),
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                window=window,
            )
            for window in windows
        )

    @property
    def identity(self) -> str:
        """Digest of all that the config says, read or not: what a model of another package reads
        of `raw` is not known here."""
        text = json.dumps(self.raw, sort_keys=True, default=repr)
        return hashlib.sha256(f"{self!r} {text}".encode("utf-8", "surrogatepass")).hexdigest()

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        return sum(group.block_bytes(1, dtype_bytes) for group in self.cache_groups)


def load_spec(directory: Path) -> ModelSpec:
    """Read DIRECTORY/config.json, or the metadata of a GGUF file in the directory's place. Raises
    ModelError if it is absent or not understood."""
    if is_gguf(directory):
        return parse_spec(gguf_config(GGUFFile(directory)))
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(_no_config(directory)) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}.") from error
    return parse_spec(raw)


def _no_config(directory: Path) -> str:
    files = sorted(path.name for path in directory.glob(f"*{SUFFIX}"))
    if files:
        return f"{directory} has no config.json; to load {files[0]}, give the path of that file."
    return f"{directory} has no config.json, so it is not a model."


def parse_spec(raw: dict[str, Any]) -> ModelSpec:
    """Read a Hugging Face config dictionary. Raises ModelError for a missing field."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError("config.json has no model_type.")
    pick = _Picker(raw)
    num_layers = pick.integer("num_hidden_layers", "n_layer")
    hidden = pick.integer("hidden_size", "n_embd")
    heads = pick.integer("num_attention_heads", "n_head")
    return ModelSpec(
        model_type=model_type,
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=pick.integer(
            "intermediate_size", "ffn_dim", "n_inner", default=4 * hidden
        ),
        num_heads=heads,
        num_kv_heads=pick.integer("num_key_value_heads", default=heads),
        head_dim=pick.integer("head_dim", default=hidden // heads),
        vocab_size=pick.integer("vocab_size"),
        max_position=pick.integer("max_position_embeddings", "n_positions", "n_ctx"),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        tie_embeddings=bool(raw.get("tie_word_embeddings", model_type in ("gpt2", "opt"))),
        layer_windows=_layer_windows(raw, num_layers),
        eos_token_ids=_ids(raw.get("eos_token_id")),
        bos_token_id=raw.get("bos_token_id"),
        raw=raw,
    )


class _Picker:
    """Reads an integer under the first of several names that the config has."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self._raw = raw

    def integer(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self._raw.get(name)
            if isinstance(value, int):
                return value
        if default is None:
            raise ModelError(f"config.json has none of the fields {', '.join(names)}.")
        return default


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _layer_windows(raw: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: None where a layer attends to everything before it."""
    window = raw.get("sliding_window")
    types = raw.get("layer_types")
    model_type = raw["model_type"]
    if window is None or raw.get("use_sliding_window", model_type != "qwen3_moe") is False:
        return (None,) * num_layers
    if types:
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if model_type in ("mistral", "qwen3_moe"):
        return (window,) * num_layers
    if "max_window_layers" in raw:  # qwen2, qwen3: the first layers attend fully
        first = raw["max_window_layers"]
        return tuple(None if i < first else window for i in range(num_layers))
    return (None,) * num_layers
