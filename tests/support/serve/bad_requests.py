"""Bad requests in the field's terms: what they set, and which field every door must blame.

A case names fields as `SamplingParams` and `Request` do; `doors.py` translates them.
"""

import math
from dataclasses import dataclass
from typing import Any

from quire.base.errors import CONTEXT_LENGTH_EXCEEDED, WRONG_RUNNER

MAX_MODEL_LEN = 128
MAX_NUM_SEQS = 4
MAX_LOGPROBS = 5
UNKNOWN_ID = 10_000_000
INF, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Case:
    """A bad request. param: the field to blame, the first one if absent; "" is no field.
    bounds: a list that only bodies of HTTP bound, since programs hold their own lists.
    """

    name: str
    fields: dict[str, Any]
    param: str | None = None
    code: str | None = None
    status: int = 400
    bounds: bool = False

    @property
    def blamed(self) -> str:
        return next(iter(self.fields)) if self.param is None else self.param

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


def structured(**form: Any) -> dict[str, Any]:
    return {"structured_outputs": form}


def nested(depth: int) -> dict[str, Any]:
    """Return a schema of arrays of arrays."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


BEAMS = {"use_beam_search": True, "n": 2, "temperature": 1.0}
TOO_LONG = CONTEXT_LENGTH_EXCEEDED

CASES = [
    # the prompt
    Case("text too long", {"prompt": "fox " * MAX_MODEL_LEN}, code=TOO_LONG),
    Case("ids too long", {"prompt_token_ids": [5] * MAX_MODEL_LEN}, code=TOO_LONG),
    Case("ids far too long", {"prompt_token_ids": [5] * 4 * MAX_MODEL_LEN}, code=TOO_LONG),
    Case("no ids", {"prompt_token_ids": []}),
    Case("no text", {"prompt": ""}),
    Case("unknown id", {"prompt_token_ids": [5, UNKNOWN_ID]}),
    Case("id beyond int64", {"prompt_token_ids": [5, 2**70]}),
    Case("negative id", {"prompt_token_ids": [-1, 5]}),
    Case("id is no number", {"prompt_token_ids": [5, "fox"]}),
    Case("truncated to nothing", {"truncate_prompt_tokens": 0}),
    Case("truncated below -1", {"truncate_prompt_tokens": -2}),
    Case("truncated at a wrong side", {"truncation_side": "middle"}),
    # sampling
    Case("temperature below 0", {"temperature": -0.1}),
    Case("temperature above 2", {"temperature": 2.1}),
    Case("temperature is NaN", {"temperature": NAN}),
    Case("temperature is infinite", {"temperature": INF}),
    Case("top_p is 0", {"top_p": 0.0, "temperature": 1.0}),
    Case("top_p above 1", {"top_p": 1.5, "temperature": 1.0}),
    Case("top_p is NaN", {"top_p": NAN, "temperature": 1.0}),
    Case("top_k below -1", {"top_k": -2, "temperature": 1.0}),
    Case("top_k too large", {"top_k": 2**31, "temperature": 1.0}),
    Case("min_p above 1", {"min_p": 1.1, "temperature": 1.0}),
    Case("min_p below 0", {"min_p": -0.1, "temperature": 1.0}),
    Case("presence_penalty too large", {"presence_penalty": 2.5}),
    Case("frequency_penalty too small", {"frequency_penalty": -2.5}),
    Case("repetition_penalty is 0", {"repetition_penalty": 0.0}),
    Case("repetition_penalty too large", {"repetition_penalty": 101.0}),
    Case("seed beyond 64 bits", {"seed": 2**63}),
    Case("seed far below 0", {"seed": -(2**63) - 1}),
    Case("bias of an unknown token", {"logit_bias": {UNKNOWN_ID: 1.0}}),
    Case("bias of a negative token", {"logit_bias": {-1: 1.0}}),
    Case("bias is NaN", {"logit_bias": {5: NAN}}),
    Case("bias is infinite", {"logit_bias": {5: INF}}),
    Case("nothing allowed", {"allowed_token_ids": []}),
    Case("unknown token allowed", {"allowed_token_ids": [5, UNKNOWN_ID]}),
    Case("negative token allowed", {"allowed_token_ids": [-1]}),
    Case("empty bad word", {"bad_words": [""]}),
    Case("bad word is a number", {"bad_words": [7]}),
    Case("dry_multiplier below 0", {"dry_multiplier": -1.0}),
    Case("dry_multiplier is infinite", {"dry_multiplier": INF}),
    Case("dry_base below 1", {"dry_base": 0.5}),
    Case("dry_base too large", {"dry_base": 101.0}),
    Case("dry_allowed_length is 0", {"dry_allowed_length": 0}),
    Case("dry_penalty_last_n below -1", {"dry_penalty_last_n": -2}),
    Case("empty dry breaker", {"dry_sequence_breakers": [""]}),
    Case("xtc_probability above 1", {"xtc_probability": 1.5}),
    Case("xtc_probability is NaN", {"xtc_probability": NAN}),
    Case("xtc_threshold is 0", {"xtc_threshold": 0.0}),
    Case("xtc_threshold above 1", {"xtc_threshold": 1.5}),
    Case("unknown logits processor", {"logits_processors": ["nobody brings this"]}),
    Case("logits processor without a name", {"logits_processors": [{"kwargs": {}}]}),
    # sequences
    Case("n is 0", {"n": 0}),
    Case("n below 0", {"n": -1}),
    Case("n beyond any engine", {"n": 20_000, "temperature": 1.0}),
    Case("n above max_num_seqs", {"n": MAX_NUM_SEQS + 1, "temperature": 1.0}),
    Case("n without sampling", {"n": 2, "temperature": 0.0}),
    Case("best_of below n", {"best_of": 1, "n": 2, "temperature": 1.0}),
    Case("best_of above max_num_seqs", {"best_of": MAX_NUM_SEQS + 1, "temperature": 1.0}),
    Case("best_of without sampling", {"best_of": 2, "temperature": 0.0}),
    Case("beam_width below n", {"beam_width": 1, **BEAMS}),
    Case("beams above max_num_seqs", {"beam_width": MAX_NUM_SEQS + 1, **BEAMS}),
    Case("beams with a bad word", {"bad_words": ["fox"], **BEAMS}),
    Case("beams with a bias", {"logit_bias": {5: 1.0}, **BEAMS}),
    Case("beams with stop texts", {"stop": ["fox"], **BEAMS}),
    Case("beams with top_k", {"top_k": 3, **BEAMS}),
    Case("length_penalty too large", {"length_penalty": 11.0, **BEAMS}),
    Case("length_penalty is NaN", {"length_penalty": NAN, **BEAMS}),
    Case("early_stopping is a word", {"early_stopping": "soon", **BEAMS}),
    # where an answer ends
    Case("max_tokens below 0", {"max_tokens": -1}),
    Case("min_tokens above max_tokens", {"min_tokens": 9, "max_tokens": 8}),
    Case("min_tokens below 0", {"min_tokens": -1}),
    Case("empty stop text", {"stop": [""]}),
    Case("too many stop texts", {"stop": [f"s{number}" for number in range(17)]}, bounds=True),
    Case("stop text too long", {"stop": ["x" * 513]}, bounds=True),
    Case("unknown stop token", {"stop_token_ids": [UNKNOWN_ID]}),
    Case("negative stop token", {"stop_token_ids": [-1]}),
    Case("too many stop tokens", {"stop_token_ids": list(range(1025))}),
    Case("too many bad words", {"bad_words": [f"w{number}" for number in range(257)]}, bounds=True),
    Case("bad word too long", {"bad_words": ["x" * 513]}, bounds=True),
    Case("too many dry breakers", {"dry_sequence_breakers": ["."] * 65}, bounds=True),
    Case("too many logits processors", {"logits_processors": ["a"] * 9}, bounds=True),
    Case("bias of too many tokens", {"logit_bias": dict.fromkeys(range(1025), 1.0)}, bounds=True),
    Case("repetition of a huge pattern", {
        "repetition_detection": {"max_pattern_size": 1025, "min_count": 2}}),
    Case("repetition that begins at once", {
        "repetition_detection": {"max_pattern_size": 2, "min_count": 1}}),
    Case("repetition of no pattern", {
        "repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}}),
    # what is shown
    Case("logprobs above max_logprobs", {"logprobs": MAX_LOGPROBS + 1}),
    Case("logprobs below -1", {"logprobs": -2}),
    Case("prompt_logprobs above max_logprobs", {"prompt_logprobs": MAX_LOGPROBS + 1}),
    Case("prompt_logprobs of all", {"prompt_logprobs": -1}),
    Case("prompt_logprobs below -1", {"prompt_logprobs": -2}),
    Case("logprobs of an unknown token", {"logprob_token_ids": [UNKNOWN_ID]}),
    Case("logprobs of a negative token", {"logprob_token_ids": [-1]}),
    Case("logprobs of too many tokens", {"logprob_token_ids": list(range(129))}),
    Case("prompt logprobs of an unknown token", {"prompt_logprob_token_ids": [[UNKNOWN_ID]]}),
    Case("prompt logprobs of too few tokens", {
        "prompt_logprob_token_ids": [[5]], "prompt_token_ids": [5, 6, 7]}),
    Case("prompt logprobs from nowhere", {"prompt_logprob_start": 1}),
    Case("stream_interval is 0", {"stream_interval": 0}),
    # constraints
    Case("regex without an end", structured(regex="(fox")),
    Case("grammar that is none", structured(grammar="this is ::= not )( a grammar")),
    Case("grammar without a rule", structured(grammar="root ::= missing")),
    Case("schema is no schema", structured(json={"type": 7})),
    Case("schema that nothing matches", structured(json={"type": "unheard of"})),
    Case("schema text is no JSON", structured(json="{")),
    Case("schema nested too deep", structured(json=nested(300))),
    Case("two constraints", structured(regex="a", choice=["b"])),
    Case("no constraint", structured(disable_any_whitespace=True)),
    Case("no choices", structured(choice=[])),
    Case("empty choice", structured(choice=[""])),
    Case("structural tag is none", structured(structural_tag="{}")),
    # the request
    Case("salt too long", {"cache_salt": "x" * 1025}),
    Case("timeout below 0", {"timeout_s": -1.0}),
    Case("timeout is infinite", {"timeout_s": INF}),
    Case("timeout is NaN", {"timeout_s": NAN}),
    Case("keep_s below 0", {"keep_s": -1.0}),
    Case("keep_s beyond a day", {"keep_s": 86401.0}),
    Case("keep_s is NaN", {"keep_s": NAN}),
    Case("keep_s with best_of", {"keep_s": 5.0, "best_of": 2, "temperature": 1.0}),
    Case("ttl_s below 0", {"ttl_s": -1.0}),
    Case("ttl_s is NaN", {"ttl_s": NAN}),
    Case("pin share of 0", {"pin_share": 0.0}),
    Case("pin share above 1", {"pin_share": 1.5}),
    Case("pin share is NaN", {"pin_share": NAN}),
    Case("priority beyond 32 bits", {"priority": 2**31}),
    Case("tenant too long", {"tenant": "x" * 257}),
    Case("core that there is not", {"data_parallel_rank": 7}),
    Case("core below 0", {"data_parallel_rank": -1}),
    Case("transfer of too many fields", {
        "kv_transfer_params": {f"f{number}": 1 for number in range(65)}}),
    Case("transfer that is none", {"kv_transfer_params": {"do_remote_decode": "yes"}}),
    Case("unknown model", {"model": "nobody"}, code="model_not_found", status=404),
]  # fmt: skip

POOLING_CASES = [
    Case("text too long", {"prompt": "fox " * MAX_MODEL_LEN * 4}, code=TOO_LONG),
    Case("ids too long", {"prompt_token_ids": [5] * (MAX_MODEL_LEN + 1)}, code=TOO_LONG),
    Case("no ids", {"prompt_token_ids": []}),
    Case("unknown id", {"prompt_token_ids": [5, UNKNOWN_ID]}),
    Case("negative id", {"prompt_token_ids": [-1]}),
    Case("truncated to nothing", {"truncate_prompt_tokens": 0}),
    Case("truncated below -1", {"truncate_prompt_tokens": -2}),
    Case("truncated at a wrong side", {"truncation_side": "middle"}),
    Case("salt too long", {"cache_salt": "x" * 1025}),
    Case("timeout below 0", {"timeout_s": -1.0}),
    Case("timeout is infinite", {"timeout_s": INF}),
    Case("priority beyond 32 bits", {"priority": 2**31}),
    Case("unknown model", {"model": "nobody"}, code="model_not_found", status=404),
]

WRONG = Case("for the other kind of engine", {"prompt": "fox"}, param="", code=WRONG_RUNNER)


# Fields that no value makes wrong, or whose bad values are refused as any wrong kind is.
HARMLESS = {
    **dict.fromkeys(
        ("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity",
         "prompt_cache_retention", "session_id", "guided_decoding_backend", "prediction"),
        "accepted and ignored",
    ),
    **dict.fromkeys(
        ("ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "echo",
         "include_stop_str_in_output", "output_kind", "skip_reading_prefix_cache", "stream",
         "stream_options", "return_token_ids", "return_tokens_as_token_ids", "add_special_tokens",
         "add_generation_prompt", "continue_final_message", "parallel_tool_calls",
         "include_reasoning", "return_token_offsets", "request_id", "user"),
        "only how an answer is shown or told apart",
    ),
    **dict.fromkeys(
        ("shown_special_token_ids", "dry_breaker_token_ids"), "set by the server, from its formats"
    ),
    **dict.fromkeys(
        ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
         "guided_whitespace_pattern", "grammar", "json_schema", "regex", "ebnf"),
        "other names of structured_outputs, in one function for all bodies",
    ),
    **dict.fromkeys(
        ("watermarking", "ec_transfer_params", "vllm_xargs", "prompt_embeds", "functions",
         "function_call", "modalities", "audio", "web_search_options", "media_io_kwargs",
         "mm_processor_kwargs", "return_prompt_text"),
        "refused whatever it holds but the neutral value (tests/serve/api/test_open_body.py)",
    ),
    "lora": "bodies of HTTP have it (tests/serve/api/test_adapters.py)",
    **dict.fromkeys(
        ("tools", "tool_choice", "documents", "chat_template", "chat_template_kwargs",
         "reasoning_effort", "suffix", "thinking_token_budget"),
        "rendered or read before there is a request (tests/serve/api)",
    ),
}  # fmt: skip
