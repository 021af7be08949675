"""Any config is accepted, or rejected by an error that names the field.

No other error is raised, and nothing hangs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ModelError
from quire.models.outline import outline
from quire.spec.config_fields import Fields, shown
from quire.spec.model_spec import load_spec, parse_spec
from tests.serve.test_cache_identity import CONFIGS, changed, fields_read

HUGE = 10**400
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 3, 7, 10**9, (1 << 31) - 1, 1 << 40, HUGE, 0.0, -0.5, 1.5, 1e-300,
    1e308, math.inf, math.nan, "", "x", "silu", "default", [], [1], [None], [-1], [[[1]]],
    ["full_attention"], ["sliding_attention"] * 3, {}, {"a": {"b": 1}},
]  # fmt: skip
# Fields that limit each other: the error about one of them may name another.
RELATED = {
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
    "hidden_size",
    "n_embd",
    "head_dim",
}


def quick_or_slow() -> list[Any]:
    """Return cases: one config of each type and of each kind of rope, with some values.

    Cases of all configs with all values are slow."""
    quick = {config["model_type"]: name for name, config in reversed(CONFIGS.items())}.values()
    return [pytest.param(n, False, id=n) for n in CONFIGS if n in quick or "rope" in n] + [
        pytest.param(n, True, id=f"{n}, all values", marks=pytest.mark.slow) for n in CONFIGS
    ]


@pytest.mark.parametrize(("name", "is_whole"), quick_or_slow())
def test_absurd_values_are_accepted_or_rejected_by_field(name: str, is_whole: bool) -> None:
    """Parse and check every value; outline some of the accepted configs.

    Outlines take nearly all of the time. Unless is_whole, every fourth field gets outlines, for
    the last accepted value of a few types."""
    refused, of_config = 0, len(name)
    for number, path in enumerate(sorted(fields_read(CONFIGS[name]))):
        accepted: dict[object, Any] = {}
        for value in VALUES:
            if is_refused(name, path, value, is_outlined=is_whole):
                refused += 1
            else:
                accepted[str(value) if isinstance(value, bool) else type(value)] = value
        kinds = list(accepted.values())
        is_outlined = not is_whole and (number + of_config) % 4 == 0
        for value in (kinds[number % 3 :: 3] or kinds[-1:]) if is_outlined else []:
            is_refused(name, path, value, is_outlined=True)
    assert refused > 200


def is_refused(name: str, path: tuple[str, ...], value: Any, *, is_outlined: bool) -> bool:
    """Return whether a config with this value is rejected; the error must name the field."""
    config = CONFIGS[name]
    try:
        spec = parse_spec(changed(config, path, value))
        spec.check()
        if is_outlined and spec.model_type == config["model_type"]:
            outline(spec)
    except ModelError as error:
        text = str(error)
        named = path[-1] in text or path[-1] in RELATED and any(r in text for r in RELATED)
        assert named, (path, value, text)
        assert len(text) < 500, text
        return True
    return False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be a whole number from 1"),
        ({"hidden_size": [32]}, r"hidden_size is \[32\]; it must be a whole number"),
        ({"hidden_size": True}, "hidden_size is true; it must be a whole number"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers is 1000000000000.*0; .* to 4096"),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"num_hidden_layers": "12"}, "num_hidden_layers is '12'"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan; it must be a number from 0"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06"),
        ({"rope_theta": 0}, "rope_theta is 0; it must be a number above"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2}}, "rope_scaling: factor is -2"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\]; it must be an object"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide .*, 4"),
        ({"hidden_size": 33}, "hidden_size is 33; it is not a multiple of 4 heads"),
        ({"head_dim": 7}, "head_dim is 7; heads of 7 dimensions cannot be rotated"),
        ({"attention_bias": "false"}, "attention_bias is 'false'; it must be true or false"),
        ({"eos_token_id": ["a"]}, r"eos_token_id is \['a'\]; it must hold whole numbers"),
        ({"model_type": 3}, "model_type is 3; it must be a text"),
        ({"torch_dtype": "float8"}, "torch_dtype is 'float8'; it must be one of float64"),
    ],
)
def test_error_messages_state_field_and_value(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = CONFIGS["llama"] | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        load_spec(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "is nested too deeply, 32 levels at most"),
        ('{"a":' * 33 + "1" + "}" * 33, "is nested too deeply"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "not valid JSON .*4300 digits"),
        ("[1]", "must hold a JSON object, not list"),
        ("", "not valid JSON"),
        ("\xff\xfe", "not valid JSON"),
    ],
    ids=["deep", "33 levels", "digits", "list", "empty", "bytes"],
)
def test_files_that_are_not_valid_configs_are_rejected(
    text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=message):
        load_spec(tmp_path)


def test_directory_or_huge_file_as_config_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match="cannot be read"):
        load_spec(tmp_path)
    (tmp_path / "config.json").rmdir()
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match="more than 67,108,864 bytes"):
        load_spec(tmp_path)


def test_values_in_error_messages_are_short() -> None:
    assert shown(None) == "null"
    assert shown(True) == "true"
    assert len(shown(["x" * 1000] * 1000)) < 300
    with pytest.raises(ModelError, match="config.json has none of the fields a, b"):
        Fields({}).integer("a", "b")
