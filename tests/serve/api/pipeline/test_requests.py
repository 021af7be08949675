"""A request's fields become SamplingParams, without a server."""

from typing import Any

import pytest

from quire.base.errors import RequestError
from quire.base.requests.sampling_params import RequestOutputKind, SamplingParams
from quire.render.generation import GenerationDefaults
from quire.render.renderer import RenderedPrompt
from quire.serve.bodies import protocol
from quire.serve.bodies.open_body import check_neutral, unsupported_fields
from quire.serve.bodies.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from quire.serve.errors import ApiError
from quire.serve.pipeline.completion import completion_params
from quire.serve.pipeline.requests import SAME, chat_params, room_after, truncated

RULES = unsupported_fields(CompletionRequest) | unsupported_fields(ChatCompletionRequest)
DEFAULTS = GenerationDefaults((2,), {"temperature": 0.6, "top_p": 0.95, "max_tokens": 1024})
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


def completion(room: int = 100, **fields: Any) -> SamplingParams:
    return completion_params(CompletionRequest(prompt="x", **fields), DEFAULTS, room)


def chat(room: int = 100, **fields: Any) -> SamplingParams:
    return chat_params(ChatCompletionRequest(**CHAT, **fields), DEFAULTS, room)


def test_request_fields_override_the_models_defaults() -> None:
    params = completion(temperature=0.1, top_k=7)
    assert (params.temperature, params.top_p, params.top_k) == (0.1, 0.95, 7)
    assert completion(temperature=None).temperature == 0.6
    assert completion(temperature=0).is_greedy


@pytest.mark.parametrize(
    ("given", "room", "length"),
    [(None, 100, 16), (None, 5, 5), (50, 100, 50), (100, 100, 100), (0, 100, 1), (1, 1, 1)],
)
def test_completion_length_defaults_to_16_or_what_fits(
    given: int | None, room: int, length: int
) -> None:
    assert completion(room, max_tokens=given).max_tokens == length


@pytest.mark.parametrize(
    ("fields", "length"),
    [({}, 100), ({"max_tokens": 7}, 7), ({"max_completion_tokens": 8}, 8),
     ({"max_tokens": 7, "max_completion_tokens": 8}, 8)],
)  # fmt: skip
def test_chat_length_defaults_to_what_fits(fields: dict[str, int], length: int) -> None:
    """The model's own max_new_tokens is ignored; the default is the rest of the context."""
    assert chat(**fields).max_tokens == length


def test_lengths_that_do_not_fit_are_refused() -> None:
    for make, name in ((completion, "max_tokens"), (chat, "max_completion_tokens")):
        with pytest.raises(ApiError, match=f"{name}=101 is too large.*leaves 100") as error:
            make(**{name: 101})
        assert (error.value.param, error.value.status) == (name, 400)
    with pytest.raises(ApiError, match="max_tokens must be at least 1, got 0"):
        chat(max_tokens=0)
    with pytest.raises(ApiError, match="min_tokens"):
        completion(max_tokens=0, min_tokens=1)
    with pytest.raises(RequestError, match="min_tokens must be at most max_tokens=16"):
        completion(min_tokens=17)


def test_only_streams_get_deltas() -> None:
    assert completion().output_kind is RequestOutputKind.FINAL_ONLY
    assert completion(stream=True).output_kind is RequestOutputKind.DELTA
    assert chat(stream=True).output_kind is RequestOutputKind.DELTA


@pytest.mark.parametrize(
    ("fields", "logprobs", "prompt_logprobs"),
    [({}, None, None), ({"logprobs": 2}, 2, None), ({"logprobs": 2, "echo": True}, 2, 2),
     ({"echo": True}, None, None), ({"prompt_logprobs": 3, "logprobs": 0, "echo": True}, 0, 3),
     ({"logprobs": -1, "echo": True, "prompt_logprobs": 1}, -1, -1)],
)  # fmt: skip
def test_completion_logprobs_become_params(
    fields: dict[str, Any], logprobs: int | None, prompt_logprobs: int | None
) -> None:
    params = completion(**fields)
    assert (params.logprobs, params.prompt_logprobs) == (logprobs, prompt_logprobs)


def test_chat_logprobs_become_params() -> None:
    assert chat().logprobs is None
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).logprobs == 4
    assert chat(logprobs=False, top_logprobs=0).logprobs is None


def test_single_stop_string_becomes_a_list() -> None:
    assert completion(stop="a").stop == ["a"]
    assert completion(stop=["a", "b"]).stop == ["a", "b"]


def test_shared_fields_exist_on_both_sides() -> None:
    assert set(SAME) <= set(SamplingParams.__struct_fields__)
    assert set(SAME) <= set(GenerationRequest.model_fields)


def test_neutral_rules_match_the_described_fields() -> None:
    fields = [
        field
        for kind in (CompletionRequest, ChatCompletionRequest)
        for field in kind.model_json_schema()["properties"].items()
    ]
    neutral = {name for name, f in fields if f.get("description") == "only at its neutral value"}
    assert neutral == set(RULES) and len(neutral) == 14


@pytest.mark.parametrize("name", sorted(RULES))
def test_only_neutral_values_are_accepted(name: str) -> None:
    text = name in CompletionRequest.model_fields
    kind: Any = CompletionRequest if text else ChatCompletionRequest
    base = {} if text else CHAT
    for value in (None, *RULES[name].values):
        check_neutral(kind(**base, **{name: value}))
    with pytest.raises(ApiError) as error:
        check_neutral(kind(**base, **{name: "something else"}))
    assert error.value.param == name
    assert "something else" in error.value.message


def test_prompts_are_truncated() -> None:
    prompt = RenderedPrompt(list(range(10)), "text")

    def cut(**fields: Any) -> list[int]:
        return truncated(prompt, CompletionRequest(prompt="x", **fields), 12).token_ids

    assert truncated(prompt, CompletionRequest(prompt="x"), 12) is prompt
    assert cut(truncate_prompt_tokens=3) == [7, 8, 9]
    assert cut(truncate_prompt_tokens=3, truncation_side="right") == [0, 1, 2]
    assert cut(truncate_prompt_tokens=30) == list(range(10))
    assert cut(truncate_prompt_tokens=-1, max_tokens=5) == list(range(3, 10))
    assert cut(truncate_prompt_tokens=-1, max_tokens=500) == [9]
    body = ChatCompletionRequest(**CHAT, truncate_prompt_tokens=-1, max_completion_tokens=4)
    assert truncated(prompt, body, 12).token_ids == list(range(2, 10))


def test_prompt_must_leave_room_for_a_token() -> None:
    prompt = RenderedPrompt(list(range(10)))
    assert room_after(prompt, 11, "prompt") == 1
    with pytest.raises(ApiError, match="10 tokens, and max_model_len is 10") as error:
        room_after(prompt, 10, "messages")
    assert (error.value.param, error.value.code) == ("messages", "context_length_exceeded")


def test_documented_limits_are_unchanged() -> None:
    """Numbers that the documentation and clients rely on."""
    assert (protocol.MAX_STOPS, protocol.MAX_STOP_CHARS) == (16, 512)
    assert (protocol.MAX_LOGIT_BIAS, protocol.MAX_BAD_WORDS) == (1024, 256)
    assert (protocol.MAX_PROMPTS, protocol.MAX_MESSAGES, protocol.MAX_TOOLS) == (256, 4096, 128)
    assert protocol.MAX_SALT_CHARS == 1024
