"""Settings of adapters (LoRA): how many an engine holds, and which ones a server offers."""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError, ModelError
from quire.base.settings.fields import check, setting

MAX_RANK = 256
MAX_SLOTS = 1024
NAME = re.compile(r"[\w.\-/:@+]{1,128}")
MODULE = re.compile(r"\w+(\.\w+)*")
EXPERTS = "experts"  # the module of a mixture's experts, in names of their modules


@dataclass(frozen=True)
class LoraConfig:
    """Adapters of an engine, under vLLM's names."""

    enable_lora: bool = setting(False, "let requests use adapters (LoRA) of the model")
    max_loras: int = setting(8, "maximum number of adapters in use at once; further requests wait")
    max_lora_rank: int = setting(16, f"maximum rank of an adapter, up to {MAX_RANK}")
    max_cpu_loras: int | None = setting(
        None,
        "maximum number of adapters in the host's memory, at least `--max-loras`; the least"
        " recently used leaves first; by default `--max-loras`",
    )
    lora_target_modules: tuple[str, ...] = setting(
        (),
        "modules that adapters may change, such as `q_proj`; others are refused; by default all;"
        " without `experts`, a mixture's experts get no memory",
    )

    def __post_init__(self) -> None:
        check(1 <= self.max_loras <= MAX_SLOTS, "max_loras", self.max_loras, f"1 to {MAX_SLOTS}")
        rank, held = self.max_lora_rank, self.max_cpu_loras
        check(1 <= rank <= MAX_RANK, "max_lora_rank", rank, f"from 1 to {MAX_RANK}")
        fits = held is None or held >= self.max_loras
        check(fits, "max_cpu_loras", held, f"at least max_loras={self.max_loras}")
        targets = self.lora_target_modules
        named = all(MODULE.fullmatch(name) for name in targets)
        check(named, "lora_target_modules", targets, "names of modules, such as q_proj")

    @property
    def usable_rank(self) -> int:
        """Return the maximum rank of an adapter; 0 without adapters."""
        return self.max_lora_rank if self.enable_lora else 0

    @property
    def changes_experts(self) -> bool:
        """Return whether adapters may change the experts of a mixture."""
        return not self.lora_target_modules or EXPERTS in self.lora_target_modules

    def may_change(self, module: str) -> bool:
        """Return whether adapters may change a module, for example `layers.3.self_attn.q_proj`. Its
        name must end with one of the targets. The target `experts` allows all modules of experts,
        and no other target allows them."""
        targets = self.lora_target_modules
        if not targets or EXPERTS in module.split("."):
            return self.changes_experts
        return f".{module}".endswith(tuple(f".{name}" for name in targets))

    def check_targets(self, modules: Collection[str]) -> None:
        """Raise ConfigError if a target is in none of a model's modules. modules: their names."""
        for target in self.lora_target_modules:
            one = replace(self, lora_target_modules=(target,))
            if not any(map(one.may_change, modules)):
                known = sorted({name.rpartition(".")[2] for name in modules})
                raise ConfigError(
                    f"lora_target_modules: the model has no module {target!r}; it has"
                    f" {', '.join(known[:20])}."
                )

    def check_module(self, module: str, path: Path) -> None:
        """Raise ModelError if adapters may not change a module. path: the adapter's file."""
        if not self.may_change(module):
            raise ModelError(
                f"{path}: {module} is none of lora_target_modules={list(self.lora_target_modules)},"
                " so adapters may not change it; add it there, or train the adapter without it."
            )

    @property
    def num_held(self) -> int:
        """Return the number of adapters in memory at most."""
        return self.max_cpu_loras or self.max_loras


@dataclass(frozen=True)
class LoraModule:
    """An adapter that a server offers under a name. base: name of the base model, if given."""

    name: str
    path: str
    base: str = ""


@dataclass(frozen=True)
class ServedAdapters:
    """Adapters of a server."""

    lora_modules: tuple[str, ...] = setting(
        (),
        "adapters to offer: `name=path`, or JSON such as"
        ' `{"name": "sql", "path": "/adapters/sql"}`; needs `--enable-lora`',
    )
    lora_roots: tuple[str, ...] = setting(
        (),
        "directories below which keys that are not admin keys may load adapters with"
        " `/v1/load_lora_adapter`; by default none",
    )

    def __post_init__(self) -> None:
        names = [module.name for module in parse_modules(self.lora_modules)]
        check(len(set(names)) == len(names), "lora_modules", names, "of different names")


def parse_modules(given: Sequence[str]) -> list[LoraModule]:
    """Parse `--lora-modules`. Raises ConfigError."""
    found: list[LoraModule] = []
    for text in given:
        if text.lstrip().startswith(("{", "[")):
            found += [_module_of(each, text) for each in _items(text)]
        else:
            name, equals, path = text.partition("=")
            found.append(_module_of({"name": name, "path": path} if equals else None, text))
    return found


def is_name(name: object) -> bool:
    """Return whether a text can be an adapter's name."""
    return isinstance(name, str) and NAME.fullmatch(name) is not None


def _items(text: str) -> list[Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(text) from error
    return value if isinstance(value, list) else [value]


def _module_of(value: Any, text: str) -> LoraModule:
    if not isinstance(value, dict):
        raise _wrong(text)
    name, path, base = value.get("name"), value.get("path"), value.get("base_model_name") or ""
    if not is_name(name) or not isinstance(path, str) or not path or not isinstance(base, str):
        raise _wrong(text)
    if unknown := value.keys() - {"name", "path", "base_model_name"}:
        raise ConfigError(f"lora_modules has unknown fields {sorted(unknown)} in {text[:200]!r}.")
    return LoraModule(str(name), path, base)


def _wrong(text: str) -> ConfigError:
    return ConfigError(
        'lora_modules must be name=path or {"name": ..., "path": ...}, where a name has 1 to 128'
        f" letters, digits or ._-/:@+, got {text[:200]!r}."
    )
