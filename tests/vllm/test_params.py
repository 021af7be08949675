"""vLLM's parameters become quire's."""

import pytest

from quire.base.errors import RequestError
from quire.base.requests import sampling_params as quire_params
from quire.base.requests.lora_request import LoRARequest
from quire.base.requests.structured_outputs import StructuredOutputsParams
from quire.vllm.params import (
    BeamSearchParams,
    GuidedDecodingParams,
    PoolingParams,
    SamplingParams,
    absent,
    refuse_adapter,
)


def test_arguments_of_processors_are_kept_and_then_left_out() -> None:
    params = SamplingParams(extra_args={"target": 1}, max_tokens=3, flat_logprobs=True)
    assert params.extra_args == {"target": 1} and params.clone().extra_args == {"target": 1}
    found = params.to_quire([abs])
    assert type(found) is quire_params.SamplingParams
    assert (found.extra_args, found.max_tokens) == (None, 3)
    assert found.logits_processors == [abs]
    transfer = {"kv_transfer_params": {"do_remote_decode": True}}
    assert SamplingParams(extra_args={"a": 1, **transfer}).to_quire().extra_args == transfer


def test_a_copy_has_its_own_lists() -> None:
    params = SamplingParams(stop=["a"], extra_args={"x": 1})
    copy = params.clone()
    copy.stop_strings.append("b")
    assert params.stop == ["a"] and copy.stop == ["a", "b"]


def test_older_names_of_constraints() -> None:
    old = SamplingParams(guided_decoding=GuidedDecodingParams(choice=["a"], backend="xgrammar"))
    assert old.guided_decoding is None
    found = old.to_quire().structured_outputs
    assert found == StructuredOutputsParams(choice=["a"])
    assert type(found) is StructuredOutputsParams
    with pytest.raises(RequestError, match="give one of them"):
        SamplingParams(
            guided_decoding=GuidedDecodingParams(choice=["a"]),
            structured_outputs=StructuredOutputsParams(choice=["a"]),
        )


def test_wrong_values_are_value_errors() -> None:
    for fields in ({"temperature": -1}, {"top_p": 2}, {"extra_args": [1]}, {"max_tokens": 0}):
        with pytest.raises(ValueError):
            SamplingParams(**fields)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        SamplingParams(no_such_field=1)  # type: ignore[call-arg]


def test_none_may_stand_for_a_default() -> None:
    assert SamplingParams.from_optional(n=None, top_p=0.5) == SamplingParams(top_p=0.5)


def test_beams_and_pooling() -> None:
    assert BeamSearchParams(beam_width=2, max_tokens=3).sampling_params().beam_width is None
    with pytest.raises(RequestError, match="no temperature changes"):
        BeamSearchParams(beam_width=2, max_tokens=3, temperature=0.5)
    assert PoolingParams(task="embed", dimensions=3).dimensions == 3


def test_adapters_can_be_named_and_not_used() -> None:
    one = LoRARequest("sql", 1, "path")
    assert (one.lora_name, one.lora_int_id, one.lora_path) == ("sql", 1, "path")
    refuse_adapter(None)
    refuse_adapter([None, None])
    for given in (one, [None, one]):
        with pytest.raises(RequestError, match="adapters are for models.*merge_and_unload"):
            refuse_adapter(given)


def test_absent_attributes_have_a_reason() -> None:
    assert str(absent("LLM", "sleep", {"sleep": "close it"})) == "quire has no LLM.sleep: close it."
    assert "has no attribute 'x'" in str(absent("LLM", "x", {}))
