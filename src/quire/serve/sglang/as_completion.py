"""Translation of a /generate body of SGLang into a completion request, which then serves it."""

from typing import Any

from quire.serve.bodies.protocol import MAX_PROMPTS, CompletionRequest
from quire.serve.bodies.validation_errors import shown
from quire.serve.errors import bad_request
from quire.serve.sglang.protocol import Sampling, TextsBody

Json = dict[str, Any]

DEFAULT_MAX_NEW_TOKENS = 128
SAME = ("model", "priority", "timeout_s", "stream")
SAME_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "logit_bias", "n", "stop", "stop_token_ids", "skip_special_tokens",
    "spaces_between_special_tokens", "stream_interval", "ignore_eos", "json_schema", "regex",
    "ebnf",
)  # fmt: skip
# Fields of sampling_params -> fields of a completion.
RENAMED = {
    "min_new_tokens": "min_tokens", "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}  # fmt: skip


def completion_of(body: TextsBody) -> CompletionRequest:
    """Return the completion request of a body; its prompts are not in it. Raises ApiError."""
    sampling = body.sampling_params or Sampling()
    fields: Json = {name: getattr(body, name) for name in SAME}
    fields |= {name: getattr(sampling, name) for name in SAME_SAMPLING}
    fields |= {ours: getattr(sampling, own) for own, ours in RENAMED.items()}
    fields["cache_salt"] = (body.cache_salt or "") + (body.extra_key or "") or None
    given = sampling.max_new_tokens
    fields["max_tokens"] = DEFAULT_MAX_NEW_TOKENS if given is None else given
    if sampling.structural_tag is not None:
        fields["structured_outputs"] = {"structural_tag": sampling.structural_tag}
    if body.return_logprob:
        fields["logprobs"] = body.top_logprobs_num or 0
        if (body.logprob_start_len or 0) >= 0 and body.logprob_start_len is not None:
            fields["prompt_logprobs"] = body.top_logprobs_num or 0
    elif body.top_logprobs_num:
        raise bad_request("top_logprobs_num needs return_logprob=true; set it.", "top_logprobs_num")
    return CompletionRequest.model_construct(
        **{name: value for name, value in fields.items() if value is not None}
    )


def prompts_of(body: TextsBody) -> tuple[list[object], bool]:
    """Return the prompts of a body, each a text or token ids, and whether there is a list of them.
    Raises ApiError."""
    if (body.text is None) == (body.input_ids is None):
        raise bad_request("give either text or input_ids.", "text")
    if body.text is not None:
        found, is_list = body.text, isinstance(body.text, list)
        whole = found if is_list else [found]
        is_right = all(isinstance(each, str) for each in whole)
        field, kinds = "text", "a text or a list of texts"
    else:
        found = body.input_ids
        is_list = isinstance(found, list) and all(isinstance(each, list) for each in found)
        whole = found if is_list else [found]
        is_right = all(_are_ids(each) for each in whole)
        field, kinds = "input_ids", "a list of token ids or a list of such lists"
    if not whole or not is_right:
        raise bad_request(f"{field} must be {kinds}, and not empty, got {shown(found)}.", field)
    if len(whole) > MAX_PROMPTS:
        raise bad_request(
            f"{field} has {len(whole)} prompts; at most {MAX_PROMPTS} are possible in one request.",
            field,
        )
    return list(whole), is_list


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)
