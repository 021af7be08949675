"""EngineArgs and the parser of command lines."""

import dataclasses
from pathlib import Path

import pytest

from quire.base.errors import ConfigError
from quire.vllm.arguments import FIELDS, AsyncEngineArgs, EngineArgs, FlexibleArgumentParser


def parsed(*words: str) -> EngineArgs:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args(words))


def test_only_what_differs_from_the_defaults_is_given() -> None:
    assert EngineArgs("demo").given() == {"model": "demo"}
    assert EngineArgs(model="demo", seed=3, trust_remote_code=True).given() == {
        "model": "demo",
        "seed": 3,
        "trust_remote_code": True,
    }
    assert parsed().given() == {"model": "demo"}


def test_the_fields_are_those_of_a_dataclass() -> None:
    args = AsyncEngineArgs("demo", max_model_len=512)
    assert dataclasses.asdict(args)["max_model_len"] == 512
    assert {"gpu_memory_utilization", "enable_lora", "swap_space", "hf_token"} <= FIELDS.keys()
    with pytest.raises(TypeError):
        EngineArgs(nonsense=1)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--max_model_len 1K", "max_model_len", 1024),
        ("--max-model-len=2k", "max_model_len", 2000),
        ("--no-enable-prefix-caching", "enable_prefix_caching", False),
        ("--enforce_eager", "enforce_eager", True),
        ("--device-memory-utilization 0.5", "gpu_memory_utilization", 0.5),
        ("--trust-remote-code", "trust_remote_code", True),
        ("--swap-space 4", "swap_space", "4"),
        ("-tp 2", "tensor_parallel_size", 2),
        (
            "--speculative-config.method ngram --speculative-config.num_speculative_tokens 2",
            "speculative_config",
            '{"method": "ngram", "num_speculative_tokens": 2}',
        ),
    ],
)
def test_flags(words: str, name: str, value: object) -> None:
    assert getattr(parsed(*words.split()), name) == value


def test_a_file_of_settings_comes_before_the_flags(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "max_model_len: 64\nseed: 5\nenforce-eager: true\nenable-prefix-caching: false\n"
        "hf-overrides: {a: 1}\nallowed-media-domains: [x, y]\n"
    )
    args = parsed("--config", str(path), "--seed", "6")
    assert (args.max_model_len, args.seed, args.enforce_eager) == (64, 6, True)
    assert (args.enable_prefix_caching, args.hf_overrides) == (False, '{"a": 1}')
    assert parsed(f"--config={path}").seed == 5
    with pytest.raises(ConfigError, match="nowhere.yaml cannot be read"):
        parsed("--config", "nowhere.yaml")


def test_a_scripts_own_flags() -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument("--my_flag", type=int)
    parser.add_argument("--config")
    found = parser.parse_args(["--my_flag", "3", "--config", "a.yaml"])
    assert (found.my_flag, found.config) == (3, "a.yaml")


def test_a_configuration_without_a_model() -> None:
    config = EngineArgs("demo", max_model_len=64, swap_space=4).create_engine_config()
    assert (config.model_config.max_model_len, config.model_config.model) == (64, "demo")
    with pytest.raises(ConfigError, match="grpc=True is not supported"):
        EngineArgs("demo", grpc=True).create_engine_config()
