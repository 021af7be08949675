"""Translation of trainers' bodies into bodies of completions and chats, which then serve them."""

from typing import Any

from quire.serve.bodies.protocol import ChatCompletionRequest, CompletionRequest
from quire.serve.errors import bad_request
from quire.serve.rollouts.protocol import (
    RolloutBody,
    RolloutChatBody,
    RolloutFields,
    SequencesBody,
    TokensBody,
    VllmSampling,
)

Json = dict[str, Any]

# Defaults of TRL's client. vLLM's SamplingParams has the same ones.
DEFAULTS: Json = {
    "n": 1, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
    "max_tokens": 16, "logprobs": 0,
}  # fmt: skip
SHOWN = {"return_token_ids": True, "return_tokens_as_token_ids": True}
SCHEDULING = ("model", "priority", "timeout_s", "cache_salt")
IMAGE = "image_pil"  # type of TRL's image parts, whose data is the text of a PNG file in base64


def tokens_completion(body: TokensBody) -> CompletionRequest:
    """Return the completion request of a body of /inference/v1/generate."""
    fields: Json = {name: getattr(body, name) for name in SCHEDULING}
    fields |= {name: getattr(body, name) for name in ("stream", "stream_options")}
    fields["kv_transfer_params"] = body.kv_transfer_params
    fields |= _given(body.sampling_params) | {"return_tokens_as_token_ids": True}
    return CompletionRequest.model_construct(
        prompt=body.token_ids,
        **{name: value for name, value in fields.items() if value is not None},
    )


def rollout_completion(body: RolloutBody) -> CompletionRequest:
    """Return the completion request of all prompts of a body of /generate/."""
    return CompletionRequest.model_construct(prompt=body.prompts, **_sampling(body) | SHOWN)


def rollout_chats(body: RolloutChatBody) -> list[ChatCompletionRequest]:
    """Return the chat request of each conversation of a body of /chat/."""
    fields = _sampling(body) | SHOWN
    num_top = fields.pop("logprobs")
    if num_top is not None:
        fields |= {"logprobs": True, "top_logprobs": num_top}
    if body.tools:
        fields["tools"] = body.tools
    if body.chat_template_kwargs:
        fields["chat_template_kwargs"] = body.chat_template_kwargs
    return [
        ChatCompletionRequest.model_construct(messages=[_with_urls(each) for each in turns])
        .model_copy(update=fields)
        for turns in body.messages
    ]  # fmt: skip


def sequences_completion(body: SequencesBody) -> CompletionRequest:
    """Return the completion request that scores the sequences and generates nothing. Raises
    ApiError."""
    if len(body.prompt_lengths) != len(body.sequences):
        raise bad_request(
            f"prompt_lengths has {len(body.prompt_lengths)} numbers for {len(body.sequences)}"
            " sequences; give one for each sequence.",
            "prompt_lengths",
        )
    for length, sequence in zip(body.prompt_lengths, body.sequences, strict=True):
        if length > len(sequence):
            raise bad_request(
                f"prompt_lengths has {length} for a sequence of {len(sequence)} tokens; give at"
                " most its length.",
                "prompt_lengths",
            )
    return CompletionRequest.model_construct(
        prompt=body.sequences,
        max_tokens=0,
        temperature=0.0,
        prompt_logprobs=body.top_logprobs,
        return_tokens_as_token_ids=True,
    )


def _given(sampling: VllmSampling | None) -> Json:
    """Return the sampling parameters that an object sets. Its unknown fields are not among them,
    whatever their names: nothing has checked their values."""
    if sampling is None:
        return {}
    known = VllmSampling.model_fields.keys() & CompletionRequest.model_fields.keys()
    names = sampling.model_fields_set & known
    return {name: value for name in names if (value := getattr(sampling, name)) is not None}


def _sampling(body: RolloutFields) -> Json:
    """Return the parameters of a TRL body. generation_kwargs override the others, as in TRL; a null
    `logprobs` requests none."""
    given = {name: getattr(body, name) for name in body.model_fields_set & DEFAULTS.keys()}
    found = DEFAULTS | {name: value for name, value in given.items() if value is not None}
    if given.get("logprobs", 0) is None:
        found["logprobs"] = None
    found |= _given(body.generation_kwargs)
    if body.structured_outputs_regex is not None:
        found["structured_outputs"] = {"regex": body.structured_outputs_regex}
    return found


def _with_urls(message: Json) -> Json:
    """Return a message with TRL's image parts as image_url parts."""
    if not isinstance(message.get("content"), list):
        return message
    return message | {"content": [_with_url(part) for part in message["content"]]}


def _with_url(part: Any) -> Any:
    if not isinstance(part, dict) or part.get("type") != IMAGE:
        return part
    data = part.get(IMAGE)
    if not isinstance(data, str):
        raise bad_request(f"an {IMAGE} part must have its PNG file in base64 as text.", "messages")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
