"""vLLM's settings without a counterpart: neutral values are dropped, others are rejected."""

from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.base.settings.secrets import MASK
from quire.serve.vllm_compat import (
    SECRETS,
    VLLM_SETTINGS,
    drop_vllm_settings,
    ignore_vllm_setting,
)
from quire.serve.vllm_flags import FLAGS


@pytest.mark.parametrize("name", VLLM_SETTINGS)
def test_only_harmless_values_are_accepted(name: str) -> None:
    harmless = VLLM_SETTINGS[name].harmless
    for value in (None, *(("anything",) if harmless is None else harmless)):
        assert ignore_vllm_setting(name, value) == VLLM_SETTINGS[name].reason
        assert ignore_vllm_setting(name, None if value is None else str(value))
    if harmless is not None:
        with pytest.raises(ConfigError) as raised:
            ignore_vllm_setting(name, "something else")
        shown = MASK if name in SECRETS else "something else"
        assert str(raised.value).startswith(f"{name}={shown!r} is not supported: ")


def test_speculation_settings_are_merged() -> None:
    settings: dict[str, Any] = {"spec_method": "ngram", "spec_tokens": 3, "spec_model": None}
    drop_vllm_settings(settings)
    assert settings == {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'}
    with pytest.raises(ConfigError, match="give one of them"):
        drop_vllm_settings({"spec_method": "ngram", "speculative_config": {"method": "ngram"}})


def test_flags_have_unique_spellings_and_one_meaning() -> None:
    shorts = [short for each in FLAGS.values() for short in each.short]
    assert len(shorts) == len(set(shorts))
    for name, each in FLAGS.items():
        kinds = (each.is_same, bool(each.becomes), each.harmless is not None)
        assert sum(kinds) <= 1, f"{name} must be ours, a part of ours, or limited to some values"
        assert not (each.is_switch and each.several), name


def test_quire_settings_are_kept() -> None:
    settings: dict[str, Any] = {"grpc": False, "seed": 7, "uvicorn_log_level": "info"}
    drop_vllm_settings(settings)
    assert settings == {"seed": 7}
    with pytest.raises(ConfigError, match="grpc=True is not supported: the server speaks HTTP"):
        drop_vllm_settings({"seed": 7, "grpc": True})


def test_only_trust_remote_code_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    drop_vllm_settings({"trust_remote_code": False, "swap_space": 4})
    assert not caplog.messages
    drop_vllm_settings({"trust_remote_code": True})
    [message] = caplog.messages
    assert message.startswith("trust_remote_code=True is ignored: quire runs only its own code")
