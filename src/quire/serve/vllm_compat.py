"""vLLM's settings that quire does not have, so that scripts for vLLM still run.

quire accepts and ignores a value that changes nothing here, such as a default. It refuses any other
value with a reason. `LLM` and the command line read this one table.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any

from quire.base.errors import ConfigError
from quire.base.settings.secrets import MASK
from quire.serve.vllm_flags import FLAGS, VllmSetting

logger = logging.getLogger("quire")

VLLM_SETTINGS: dict[str, VllmSetting] = {
    name: setting for name, setting in FLAGS.items() if not setting.is_same and not setting.becomes
}
WARNED = "trust_remote_code"  # setting that programs see a warning for, as it asks for much
SECRETS = ("hf_token",)  # settings of vLLM whose values errors do not show
SPECULATION = "speculative_config"
# vLLM's flags for fields of `speculative_config`.
SPECULATION_FIELDS = {
    "spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens",
}  # fmt: skip


def ignore_vllm_setting(name: str, value: Any) -> str:
    """Return the reason why a setting with this value may be ignored, else raise ConfigError.

    name: a key of VLLM_SETTINGS. value: a Python value (None if not given), or text from a command
    line.
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
    """Remove the ignorable settings of vLLM in place, and merge `spec_*` fields into one setting.
    Raises ConfigError if a value may not be ignored."""
    for name in [name for name in settings if name in VLLM_SETTINGS]:
        value = settings.pop(name)
        reason = ignore_vllm_setting(name, value)
        if name == WARNED and value:
            logger.warning("%s=%r is ignored: %s.", name, value, reason)
    parts = {name: settings.pop(name) for name in SPECULATION_FIELDS if name in settings}
    given = {name: value for name, value in parts.items() if value is not None}
    if given:
        settings[SPECULATION] = speculation_of(given, settings.get(SPECULATION))


def speculation_of(given: Mapping[str, Any], whole: Any) -> str:
    """Return speculative_config as JSON, made of its fields under vLLM's names. given: the fields
    that were set. whole: the setting `speculative_config` itself, or None. Raises ConfigError if
    both are set, or if a value is invalid."""
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
