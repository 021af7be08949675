"""`EngineArgs` and vLLM's parser of command lines, made from quire's settings and vLLM's flags."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.base.settings.config import JSON_SETTINGS, config_from_flat
from quire.cli.config_file import read_yaml
from quire.cli.options.json_flags import join_parts
from quire.cli.settings import ALIASES, ENGINE, SHORT_FLAGS, Option, options_of
from quire.serve.vllm_compat import SPECULATION_FIELDS, VLLM_SETTINGS, drop_vllm_settings
from quire.serve.vllm_flags import FLAGS
from quire.vllm.configs import VllmConfig

OPTIONS = options_of(ENGINE)
# Settings of vLLM's engine without a counterpart; None is always accepted for them.
THEIRS = [name for name in (*VLLM_SETTINGS, *SPECULATION_FIELDS) if name.isidentifier()]
OF_LLM = {"allowed_local_media_path": "", "allowed_media_domains": ()}
FIELDS: dict[str, Any] = {
    **{name: option.default for name, option in OPTIONS.items()},
    **OF_LLM,
    **dict.fromkeys(["limit_mm_per_prompt", *THEIRS]),
}
_Fields: Any = dataclasses.make_dataclass(
    "_Fields", [(name, Any, dataclasses.field(default=value)) for name, value in FIELDS.items()]
)


@dataclasses.dataclass
class EngineArgs(_Fields):  # type: ignore[misc]
    """Settings of an engine as fields: quire's own and vLLM's without counterpart."""

    def given(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, as `LLM` takes them."""
        return {
            name: value
            for name, default in FIELDS.items()
            if (value := getattr(self, name)) != default or name == "model"
        }

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        """Return the settings of a parsed command line."""
        found = vars(args)
        return cls(**{name: found[name] for name in FIELDS if name in found})

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each setting; return the parser."""
        group = parser.add_argument_group("engine")
        for option in OPTIONS.values():
            _add_option(group, option)
        for name in FIELDS:
            if name not in OPTIONS:
                _add_other(group, name)
        return parser

    def create_engine_config(self, *_: Any, **__: Any) -> VllmConfig:
        """Return the checked configuration, without values that depend on the model. The arguments
        of vLLM's method change nothing. Raises ConfigError."""
        settings = self.given()
        drop_vllm_settings(settings)
        return VllmConfig.of(config_from_flat(**without_media(settings)))


@dataclasses.dataclass
class AsyncEngineArgs(EngineArgs):
    """Settings of `AsyncLLM`."""


def without_media(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without the fields that `LLM` itself reads."""
    own = {*OF_LLM, "limit_mm_per_prompt"}
    return {name: value for name, value in settings.items() if name not in own}


def _add_option(group: argparse._ActionsContainer, option: Option) -> None:
    same = [alias for alias, name in ALIASES.items() if name == option.name]
    short = [SHORT_FLAGS[option.name]] if option.name in SHORT_FLAGS else []
    flags = [*short, option.flag, *("--" + alias.replace("_", "-") for alias in same)]
    known: dict[str, Any] = {"dest": option.name, "default": option.default}
    known["help"] = option.help.replace("%", "%%")
    if option.kind is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **known)
    elif option.several:
        group.add_argument(*flags, nargs="+", type=option.parse, **known)
    else:
        group.add_argument(*flags, type=option.parse, **known)


def _add_other(group: argparse._ActionsContainer, name: str) -> None:
    theirs, flag = FLAGS.get(name), "--" + name.replace("_", "-")
    known: dict[str, Any] = {"dest": name, "default": FIELDS[name], "help": argparse.SUPPRESS}
    if theirs is not None and theirs.is_switch:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **known)
        return
    if isinstance(FIELDS[name], tuple) or (theirs is not None and theirs.several):
        known["nargs"] = "+"
    group.add_argument(flag, *(theirs.short if theirs else ()), **known)


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser that takes `_` for `-` in flags, a YAML file as `--config`, and parts of
    JSON settings, such as `--speculative-config.method ngram`."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse words; by default the command line's."""
        words = list(sys.argv[1:] if args is None else args)
        known = self._option_string_actions
        words = [self._spelled(word) for word in self._with_file(words)]
        try:
            words = join_parts(words, [*JSON_SETTINGS, *VLLM_SETTINGS], known)
        except ConfigError as error:
            self.error(str(error))
        return super().parse_known_args(words, namespace)

    def _spelled(self, word: str) -> str:
        """Return a word with the hyphens of the flag that it means."""
        flag, equals, value = word.partition("=")
        if not flag.startswith("--") or flag in self._option_string_actions:
            return word
        return flag.replace("_", "-") + equals + value

    def _with_file(self, words: list[str]) -> list[str]:
        """Return the words after the flags of `--config FILE`, which they override."""
        if "--config" in self._option_string_actions:  # the script's own
            return words
        for at, word in enumerate(words):
            if word == "--config" and at + 1 < len(words):
                return _words_of(Path(words[at + 1])) + words[:at] + words[at + 2 :]
            if word.startswith("--config="):
                return _words_of(Path(word.partition("=")[2])) + words[:at] + words[at + 1 :]
        return words


def _words_of(path: Path) -> list[str]:
    """Return the flags of a YAML file. Raises ConfigError."""
    words = []
    for name, value in read_yaml(path).items():
        flag = "--" + str(name).replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        else:
            words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words
