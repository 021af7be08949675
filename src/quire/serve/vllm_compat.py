"""vLLM's settings that have no counterpart here, for those who bring their scripts along.

A value that asks for nothing, or for what is so anyway, is accepted and ignored; any other is
refused with the reason, never taken silently. `LLM` and the command line read this one table.
"""

import json
from collections.abc import Mapping
from typing import Any

from quire.base.errors import ConfigError
from quire.base.settings.secrets import MASK
from quire.serve.vllm_flags import FLAGS, VllmSetting

VLLM_SETTINGS: dict[str, VllmSetting] = {
    name: setting for name, setting in FLAGS.items() if not setting.is_same and not setting.becomes
}
SECRETS = ("hf_token",)  # of vLLM's settings; errors do not show their values
SPECULATION = "speculative_config"
# vLLM's flags for its fields.
SPECULATION_FIELDS = {
    "spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens",
}  # fmt: skip


def ignore_vllm_setting(name: str, value: Any) -> str:
    """Return why a setting with this value may be ignored. Raise ConfigError if it may not.

    name: a key of VLLM_SETTINGS. value: as Python has it (None is not given), or as text from a
    command line.
    """
    setting = VLLM_SETTINGS[name]
    if value is None or setting.harmless is None:
        return setting.reason
    values = value if isinstance(value, list | tuple) else [value]
    if not {str(each) for each in values} <= {str(harmless) for harmless in setting.harmless}:
        shown = values[0] if len(values) == 1 else value
        if name in SECRETS:
            shown = MASK
        raise ConfigError(f"{name}={shown!r} is not supported: {setting.reason}.")
    return setting.reason


def drop_vllm_settings(settings: dict[str, Any]) -> None:
    """Take those settings out that may be ignored, and put those together that are parts of ours.
    Raise ConfigError for one that may not be."""
    for name in [name for name in settings if name in VLLM_SETTINGS]:
        ignore_vllm_setting(name, settings.pop(name))
    parts = {name: settings.pop(name) for name in SPECULATION_FIELDS if name in settings}
    given = {name: value for name, value in parts.items() if value is not None}
    if given:
        settings[SPECULATION] = speculation_of(given, settings.get(SPECULATION))


def speculation_of(given: Mapping[str, Any], whole: Any) -> str:
    """Return speculative_config as JSON, from its fields under vLLM's names for them. whole: the
    setting itself, if that is given, too. Raises ConfigError."""
    if whole is not None:
        names = ", ".join(given)
        raise ConfigError(f"{names} and {SPECULATION} mean the same; give one of them.")
    fields = {SPECULATION_FIELDS[name]: value for name, value in given.items()}
    number = fields.get("num_speculative_tokens")
    if isinstance(number, str):
        if not number.isdecimal():
            raise ConfigError(f"spec_tokens must be a whole number, got {number!r}.")
        fields["num_speculative_tokens"] = int(number)
    return json.dumps(fields)
