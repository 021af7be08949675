"""Configuration: flat names find their dataclass; unknown names are reported."""

import dataclasses

import pytest

from quire.base.errors import ConfigError
from quire.base.settings.config import (
    AUTO_LENGTH,
    SECTIONS,
    EngineConfig,
    ServerConfig,
)
from quire.base.settings.config import config_from_flat as make


def test_flat_names_set_fields_of_their_section() -> None:
    config = make(model="m", block_size=8, max_num_seqs=3, device="cpu")
    assert (config.model.model, config.cache.block_size) == ("m", 8)
    assert (config.scheduler.max_num_seqs, config.device) == (3, "cpu")


def test_max_model_len_auto_is_minus_one() -> None:
    for auto in ("auto", -1):
        assert make(max_model_len=auto).model.max_model_len == AUTO_LENGTH == -1


def test_error_for_an_unknown_name_lists_the_known_names() -> None:
    with pytest.raises(ConfigError, match="blok_size.*block_size"):
        make(blok_size=8)


@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 0},
        {"block_size": 512},
        {"gpu_memory_utilization": 0.0},
        {"gpu_memory_utilization": 1.5},
        {"watermark": 1.0},
        {"pipeline_depth": 0},
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 0},
        {"max_encoder_tokens": -1},
        {"encoder_cache_tokens": 0},
        {"max_model_len": 0},
        {"max_model_len": -2},
        {"max_model_len": "long"},
        {"kv_cache_memory_bytes": 0},
        {"dtype": "int3"},
        {"load_format": "pt"},
        {"scheduling_policy": "lottery"},
        {"device": "tpu"},
    ],
)
def test_error_for_an_invalid_value_names_the_setting(settings: dict) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=name):
        make(**settings)


def test_every_setting_has_a_help_text_and_a_unique_name() -> None:
    names = []
    for config in (*SECTIONS.values(), EngineConfig):
        for item in dataclasses.fields(config):
            if item.name in SECTIONS and config is EngineConfig:
                continue
            assert item.metadata["help"], item.name
            names.append(item.name)
    assert len(names) == len(set(names))


def test_limit_mm_per_prompt_sets_the_number_of_images() -> None:
    for given, number in (
        (None, 16), ("{}", 16), ('{"image": 3, "video": 1}', 3), ('{"image": {"count": 2}}', 2),
        ({"image": 0}, 0),
    ):  # fmt: skip
        assert ServerConfig(limit_mm_per_prompt=given).max_images == number
    for wrong in ('{"image": -1}', '{"image": "2"}', '{"sound": 1}', "[1]", "2"):
        with pytest.raises(ConfigError, match="limit_mm_per_prompt"):
            ServerConfig(limit_mm_per_prompt=wrong)


def test_allowed_sources_of_media_are_normalised_and_checked() -> None:
    config = ServerConfig(allowed_media_domains=("Example.org", " .a.net"), max_media_bytes=3000)
    assert config.allowed_media_domains == ("example.org", ".a.net")
    assert config.max_bytes_with_images == config.max_body_bytes + 4000
    assert ServerConfig(allowed_local_media_path="").allowed_local_media_path is None
    for wrong in ("https://example.org", "example.org:443", "*", "", "."):
        with pytest.raises(ConfigError, match="allowed_media_domains"):
            ServerConfig(allowed_media_domains=(wrong,))
