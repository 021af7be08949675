"""Fields of other engines that change the text of an answer, and that quire does not take.

A body's unknown fields are left out (`open_body.py`), which is right only for those that cannot
change the text: labels, cache hints, what is shown. A constraint or a way to sample that was left
out would give another text with status 200, so these are a 400 that says what to use instead. At a
neutral value, which clients send with every request, they are left out as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.serve.api.errors import ApiError, bad_request, short

NO_SUCH_SAMPLER = (
    "quire does not support this way of sampling; remove it, or use temperature, top_p or min_p"
)
NO_ADAPTERS = "quire does not load adapters; remove it"
CONSTRAINT = (
    "this endpoint does not support this constraint; use its own field for structured output"
)
NOT_THIS_ENDPOINT = "this endpoint does not support it; remove it"
IMAGES = "send images as image_url parts of messages"


@dataclass(frozen=True)
class ForeignField:
    """A field that is refused. advice: what to do instead. values: neutral ones, besides what is
    empty or null."""

    advice: str
    values: tuple[object, ...] = ()


def _all(names: str, advice: str, *values: object) -> dict[str, ForeignField]:
    return dict.fromkeys(names.split(), ForeignField(advice, values))


# Fields of llama.cpp, SGLang, text-generation-inference and Ollama; at the end those of vLLM and
# OpenAI, for the bodies that lack them.
FOREIGN: Mapping[str, ForeignField] = {
    **_all("grammar_lazy", "grammars apply from the first token; remove it", False),
    **_all("grammar_triggers", "use structured_outputs.structural_tag"),
    **_all("n_predict num_predict max_new_tokens max_length", "use max_tokens", -1),
    **_all("t_max_predict_ms", "use timeout_s", 0, -1),
    **_all("mirostat mirostat_mode", NO_SUCH_SAMPLER, 0),
    **_all("typical_p typ_p tfs tfs_z", NO_SUCH_SAMPLER, 1, 0),
    **_all("top_n_sigma", NO_SUCH_SAMPLER, -1, 0),
    **_all("top_a dynatemp_range smoothing_factor adaptive_target", NO_SUCH_SAMPLER, 0, -1),
    **_all("epsilon_cutoff eta_cutoff penalty_alpha", NO_SUCH_SAMPLER, 0),
    **_all("samplers sampler_priority sampler_order", NO_SUCH_SAMPLER),
    **_all("dynamic_temperature", NO_SUCH_SAMPLER, False),
    **_all("min_keep", NO_SUCH_SAMPLER, 0, 1),
    **_all("repeat_penalty rep_pen", "use repetition_penalty", 1),
    **_all("repeat_last_n penalty_last_n", "penalties apply to the whole text; remove it", -1),
    **_all("no_repeat_ngram_size", "use repetition_detection, or repetition_penalty", 0),
    **_all("min_new_tokens", "use min_tokens", 0),
    **_all("num_beams", "use use_beam_search and beam_width", 1),
    **_all("n_indent", "quire does not indent code; remove it", 0),
    **_all("num_ctx", "start the server with --max-model-len"),
    **_all("session_params", "use /v1/requests/ID/fork, or send the whole prompt"),
    **_all("penalize_nl", "use logit_bias", False),
    **_all("banned_tokens banned_strings custom_token_bans", "use bad_words"),
    **_all("lora lora_path lora_request adapter_id", NO_ADAPTERS),
    **_all("image_data images", IMAGES),
    **_all("ebnf", CONSTRAINT),
    **_all("stop_regex", "use stop, or structured_outputs.regex"),
    **_all("no_stop_trim", "use include_stop_str_in_output", False),
    **_all(
        "custom_logit_processor custom_params",
        "use logits_processors, which installed packages provide",
    ),
    **_all("sampling_params parameters options", "send its fields in the body itself"),
    **_all("sampling_seed", "use seed"),
    **_all("input_ids input_embeds inputs", "use prompt, or messages"),
    **_all("do_sample", "use temperature=0 for greedy decoding", True),
    **_all("watermark watermarking", "quire does not add watermarks; remove it", False),
    **_all("format", "use response_format"),
    **_all("think", "use reasoning_effort, or chat_template_kwargs", True),
    **_all("raw", "use /v1/completions", False),
    **_all("grammar regex json_schema", CONSTRAINT),
    **_all("structured_outputs response_format", CONSTRAINT),
    **_all("guided_json guided_regex guided_choice", CONSTRAINT),
    **_all("guided_grammar structural_tag", CONSTRAINT),
    **_all("logit_bias bad_words allowed_token_ids stop stop_token_ids", NOT_THIS_ENDPOINT),
    **_all("logits_processors min_tokens use_beam_search best_of suffix", NOT_THIS_ENDPOINT),
    **_all("repetition_detection chat_template", NOT_THIS_ENDPOINT),
    **_all("guided_whitespace_pattern", CONSTRAINT),
    **_all("thinking_token_budget", NOT_THIS_ENDPOINT, -1),
    **_all("n", NOT_THIS_ENDPOINT, 1),
    **_all("ignore_eos include_stop_str_in_output", NOT_THIS_ENDPOINT, False),
    **_all("frequency_penalty presence_penalty", NOT_THIS_ENDPOINT, 0),
    **_all("xtc_probability dry_multiplier", NOT_THIS_ENDPOINT, 0),
    **_all("functions", "use tools, which replaced it"),
}


def check_foreign(body: Mapping[str, Any], unknown: tuple[str, ...]) -> None:
    """Raise ApiError for the first unknown field of a body that would change the text."""
    for name in unknown:
        field = FOREIGN.get(name)
        if field is not None and not _is_neutral(body[name], field.values):
            raise _refused(name, body[name], field)


def _is_neutral(value: object, values: tuple[object, ...]) -> bool:
    if value is None or (isinstance(value, str | list | dict) and not value):
        return True
    # True == 1 in Python, but not in JSON.
    return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values)


def _refused(name: str, value: object, field: ForeignField) -> ApiError:
    return bad_request(f"{name}={short(value)}: {field.advice}.", name, "unsupported_value")
