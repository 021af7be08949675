"""The configuration of an adapter (LoRA) as PEFT writes it: adapter_config.json. No torch.

An adapter changes modules of the base model: W becomes W + scale * B A (Hu et al. 2021, section
4.1). The rank of a module is the number of rows of A, and of columns of B. Options that change
anything else are refused by name.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.base.errors import ModelError

CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 256
MAX_NAMES = 10_000  # of alpha_pattern
MAX_NAME_CHARS = 512
MAX_ALPHA = 1e6
PATTERN = re.compile(r"\^?[\w.\-]+\$?")
NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # options that must have one of these values
    "use_dora": (None, False),
    "modules_to_save": (None, [], ()),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (None, False),
    "megatron_config": (None,),
    "layer_replication": (None, []),
    # Others, such as pissa and olora, also change the base model's weights.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}


@dataclass(frozen=True)
class AdapterConfig:
    """Scales of an adapter's modules. The files say which modules it has, and their ranks, so
    `target_modules` may have any form. alpha: of modules without a pattern of their own. alphas: by
    name, end of a name, or `^` and a whole name. is_unscaled: whether all scales are 1. rank: of
    modules without a pattern of their own. has_parameters: whether tensors that hold all experts
    are changed; all experts have this rank."""

    alpha: float
    is_rank_stabilised: bool = False
    alphas: Mapping[str, float] = field(default_factory=dict)
    is_unscaled: bool = False
    rank: int = 1
    has_parameters: bool = False

    def scale_of(self, module: str, rank: int) -> float:
        """Return the factor of a module's product B A."""
        if self.is_unscaled:
            return 1.0
        found = (alpha for name, alpha in self.alphas.items() if _names(name, module))
        alpha = next(found, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Read adapter_config.json of a directory. Raises ModelError if it is missing or invalid, or if
    it has an option that quire does not support."""
    path = directory / CONFIG
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
        raw = json.loads(text) if len(text) <= MAX_CONFIG_BYTES else None
    except FileNotFoundError as error:
        raise ModelError(
            f"{directory} has no {CONFIG}; give the directory of an adapter that PEFT wrote, or a"
            " GGUF file of llama.cpp."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} must be a JSON object of at most {MAX_CONFIG_BYTES:,} bytes.")
    return _config_of(raw, path)


def _config_of(raw: dict[str, Any], path: Path) -> AdapterConfig:
    if raw.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type must be LORA, got {_shown(raw.get('peft_type'))}.")
    for name, values in NEUTRAL.items():
        if raw.get(name) not in values:
            raise ModelError(
                f"{path}: {name}={_shown(raw[name])} is not supported; merge the adapter into the"
                f" model, or train it without {name}."
            )
    alphas = raw.get("alpha_pattern") or {}
    if not isinstance(alphas, dict) or len(alphas) > MAX_NAMES:
        raise ModelError(f"{path}: alpha_pattern must be an object of at most {MAX_NAMES} names.")
    for name in alphas:
        if len(name) > MAX_NAME_CHARS or not PATTERN.fullmatch(name):
            raise ModelError(
                f"{path}: alpha_pattern has {_shown(name)}; it may have names of modules, ends of"
                " names, and `^` before a whole name, but no other patterns."
            )
    _check_rank(raw.get("r"), path)
    _check_parameters(raw, path)
    return AdapterConfig(
        alpha=_alpha(raw.get("lora_alpha"), "lora_alpha", path),
        is_rank_stabilised=bool(raw.get("use_rslora")),
        alphas={key: _alpha(each, "alpha_pattern", path) for key, each in alphas.items()},
        rank=raw["r"],
        has_parameters=bool(raw.get("target_parameters")),
    )


def _check_parameters(raw: dict[str, Any], path: Path) -> None:
    """Check `target_parameters`. The files name only the module of such a parameter, so patterns
    cannot be assigned to parameters."""
    names = raw.get("target_parameters")
    if not names:
        return
    if not isinstance(names, list) or len(names) > MAX_NAMES:
        raise ModelError(
            f"{path}: target_parameters must be a list of at most {MAX_NAMES} names of parameters,"
            f" got {_shown(names)}."
        )
    for option in ("rank_pattern", "alpha_pattern"):
        if raw.get(option):
            raise ModelError(
                f"{path}: {option} together with target_parameters is not supported; train the"
                f" adapter with one r and lora_alpha, or merge it into the model."
            )


def _check_rank(value: Any, path: Path) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANK:
        raise ModelError(f"{path}: r must be a rank from 1 to {MAX_RANK}, got {_shown(value)}.")


def _alpha(value: Any, name: str, path: Path) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -MAX_ALPHA <= value <= MAX_ALPHA:  # NaN fails, too
        raise ModelError(f"{path}: {name} must be a number, got {_shown(value)}.")
    return float(value)


def _names(pattern: str, module: str) -> bool:
    """Return whether a key of alpha_pattern names a module."""
    name = pattern.removesuffix("$")
    if name.startswith("^"):
        return name[1:] == module
    return module == name or module.endswith(f".{name}")


def _shown(value: object) -> str:
    return repr(value)[:80]
