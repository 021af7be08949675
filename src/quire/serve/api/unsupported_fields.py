"""Fields that cannot be served: fine at their neutral values, otherwise a 400 that says what to do.

Clients send many fields at their defaults; those must not fail.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from quire.serve.api.errors import bad_request

MAX_SHOWN = 80


class ShortRepr(reprlib.Repr):
    """What repr shows, of a value of any size, without looking at more of it than is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = self.maxother = MAX_SHOWN


@dataclass(frozen=True)
class Rule:
    """values: what the field may be beside None. advice: what to do instead."""

    values: tuple[Any, ...]
    advice: str


UNSUPPORTED = "is not supported; leave it out"
GRAMMAR = "structured output is not supported; ask for the format in the prompt"
RULES: dict[str, Rule] = {
    "suffix": Rule(("",), "filling in before a suffix is not supported; leave it out"),
    "response_format": Rule(({"type": "text"},), GRAMMAR),
    "structured_outputs": Rule(({},), GRAMMAR),
    "logits_processors": Rule(([],), "use logit_bias, bad_words or allowed_token_ids instead"),
    "logprob_token_ids": Rule(([],), "use logprobs, which shows the most probable tokens"),
    "return_token_offsets": Rule((False,), UNSUPPORTED),
    "repetition_detection": Rule((), "use repetition_penalty or max_tokens instead"),
    "thinking_token_budget": Rule((-1,), "use max_tokens to bound the answer"),
    "stream_interval": Rule((1,), "chunks are sent as their tokens come; leave it out"),
    "watermarking": Rule((False,), UNSUPPORTED),
    "kv_transfer_params": Rule(({},), UNSUPPORTED),
    "ec_transfer_params": Rule(({},), UNSUPPORTED),
    "vllm_xargs": Rule(({},), UNSUPPORTED),
    "prompt_embeds": Rule(([],), "send the prompt as text or token ids"),
    "functions": Rule(([],), "use tools, which replaced it"),
    "function_call": Rule(("none", "auto"), "use tools and tool_choice, which replaced it"),
    "tool_choice": Rule(
        ("auto", "none"), "forced tool calls are not supported; use 'auto' and ask in the prompt"
    ),
    "modalities": Rule((["text"], []), "this model answers with text only; use ['text']"),
    "audio": Rule((), "this model answers with text only; leave it out"),
    "web_search_options": Rule((), "the server does not search the web; leave it out"),
    "media_io_kwargs": Rule(({},), "this model takes text only; leave it out"),
    "mm_processor_kwargs": Rule(({},), "this model takes text only; leave it out"),
    "return_prompt_text": Rule((False,), "use /tokenize, or return_token_ids"),
}


def check_neutral(request: BaseModel, rules: Mapping[str, Rule] = RULES) -> None:
    """Raise a 400 for the first field that asks for something that cannot be served."""
    for name in request.model_fields_set:
        rule = rules.get(name)
        if rule is None:
            continue
        value = getattr(request, name)
        if value is not None and value not in rule.values:
            shown = ShortRepr().repr(value)
            shown = shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "..."
            raise bad_request(f"{name}={shown}: {rule.advice}.", name, "unsupported_value")
