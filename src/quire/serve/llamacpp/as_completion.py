"""Translation of the bodies of llama.cpp's server into completion requests, which then serve
them."""

from collections.abc import Mapping
from typing import Any

from quire.render.tokens.tokenizer import Tokenizer
from quire.serve.bodies.penalties import NO_PENALTIES, penalties_of
from quire.serve.bodies.protocol import CompletionRequest
from quire.serve.bodies.validation_errors import shown
from quire.serve.errors import bad_request
from quire.serve.llamacpp.protocol import CompletionBody, InfillBody, NativeBody

Json = dict[str, Any]

SAME = (
    "model", "priority", "timeout_s", "cache_salt", "temperature", "top_k", "top_p", "min_p",
    "stop", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "dry_sequence_breakers", "xtc_probability", "xtc_threshold", "ignore_eos", "grammar",
    "json_schema", "stream", "lora",
)  # fmt: skip
# Samplers, and the fields that switch each one off. The last ones are always off here.
SAMPLERS: Mapping[str, Json] = {
    "penalties": dict(NO_PENALTIES),
    "dry": {"dry_multiplier": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0},
    **dict.fromkeys(("typ_p", "typical_p", "top_n_sigma", "infill", "adaptive_p"), Json()),
}
BANNED = -100.0  # the least bias
ANY_SEED = -1


def completion_of(body: NativeBody, tokenizer: Tokenizer | None) -> CompletionRequest:
    """Return the completion request of a body; the prompt of an infill is not in it. tokenizer:
    reads texts in logit_bias. Raises ApiError."""
    fields: Json = {name: getattr(body, name) for name in SAME}
    fields |= penalties_of(body, "repeat_last_n")
    if body.seed != ANY_SEED:
        fields["seed"] = body.seed
    if body.n_predict is not None and body.n_predict >= 0:
        fields["max_tokens"] = body.n_predict
    if body.n_probs:
        fields["logprobs"] = body.n_probs
    if body.logit_bias:
        fields["logit_bias"] = _bias(body.logit_bias, tokenizer)
    if (body.t_max_predict_ms or 0) > 0:
        fields["stream"] = True  # the writer looks at the clock with each piece
    if isinstance(body, CompletionBody):
        fields["prompt"] = prompt_of(body.prompt)
    fields |= _switched_off(body)
    return CompletionRequest.model_construct(
        **{name: value for name, value in fields.items() if value is not None}
    )


def _switched_off(body: NativeBody) -> Json:
    """Return the fields that switch off the samplers that a body does not list. Their order is
    fixed here."""
    if not body.samplers:
        return {}
    for name in body.samplers:
        if name not in SAMPLERS:
            known = ", ".join(SAMPLERS)
            raise bad_request(f"samplers has {shown(name)}; known are {known}.", "samplers")
    off: Json = {}
    for name, fields in SAMPLERS.items():
        off |= fields if name not in body.samplers else {}
    return off


def _bias(given: Any, tokenizer: Tokenizer | None) -> dict[int, float]:
    """Return biases by token id. Raises ApiError.

    given: an object, or pairs of a token and a bias; `false` bans a token. A text stands for each
    of its tokens.
    """
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    found: dict[int, float] = {}
    for pair in pairs if isinstance(pairs, list) else [None]:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise _wrong_bias(pair)
        token, bias = pair
        value = BANNED if bias is False else bias
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong_bias(bias)
        if isinstance(token, str) and token.removeprefix("-").isdecimal() and len(token) < 12:
            token = int(token)
        if isinstance(token, str) and tokenizer is not None:
            found |= dict.fromkeys(tokenizer.encode(token, add_special_tokens=False), float(value))
        elif isinstance(token, int) and not isinstance(token, bool):
            found[token] = float(value)
        else:
            raise _wrong_bias(token)
    return found


def _wrong_bias(value: object) -> Exception:
    return bad_request(
        f"logit_bias must be an object or a list of pairs [TOKEN, BIAS], got {shown(value)}.",
        "logit_bias",
    )


def prompt_of(value: Any) -> object:
    """Return the prompt of a completion: a text or token ids, alone or in a list or an object.
    Raises ApiError."""
    if isinstance(value, Mapping) and not value.get("multimodal_data"):
        value = value.get("prompt_string")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(each) is int for each in value):
        return value
    raise bad_request(
        f"prompt must be one text or one list of token ids, got {shown(value)}. Send several"
        " prompts in several requests, and images to /v1/chat/completions.",
        "prompt",
    )


FILE_MARKS = ("<|file_sep|>", "<file_sep>")  # tokens before a file's name
SNIPPET = "\n\n--- snippet ---\n\n"
DEFAULT_FILE = "tmp"


def extra_text(body: InfillBody, tokenizer: Tokenizer) -> str:
    """Return the text of the other files of an infill, which comes before its prompt. Raises
    ApiError."""
    mark = next((each for each in FILE_MARKS if tokenizer.token_id(each) is not None), None)
    found: list[str] = []
    for index, file in enumerate(body.input_extra or ()):
        text, name = file.get("text", ""), file.get("filename", DEFAULT_FILE)
        if not isinstance(text, str) or not isinstance(name, str):
            where = f"input_extra[{index}]"
            raise bad_request(f"{where} must have texts as text and filename.", "input_extra")
        found.append(f"{SNIPPET}{text}" if mark is None else f"{mark}{name}\n{text}")
    if found and mark is not None:
        found.append(f"{mark}filename\n")
    return "".join(found)
