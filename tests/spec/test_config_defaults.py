"""Absent fields have the defaults of transformers' classes."""

from typing import Any

import pytest
import transformers

from quire.spec.config_defaults import DEFAULTS

# Fields whose defaults transformers keeps elsewhere, or only in its code.
ELSEWHERE = {"rope_theta", "sliding_window_pattern", "partial_rotary_factor", "rotary_pct"}


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_defaults_of_each_type_equal_those_of_transformers(model_type: str) -> None:
    theirs: dict[str, Any] = transformers.AutoConfig.for_model(model_type).to_dict()
    for name, value in DEFAULTS[model_type].items():
        if name not in ELSEWHERE:
            if name == "sliding_window" and theirs[name] in (None, 0):
                continue  # Qwen: use_sliding_window turns it on
            assert theirs[name] == value, name
    rope = theirs.get("rope_parameters")
    if "rope_theta" in DEFAULTS[model_type]:
        assert rope["rope_theta"] == DEFAULTS[model_type]["rope_theta"]
