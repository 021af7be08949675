"""Fields of other engines that quire does not have: refused if they would change the text.

A body's unknown fields are removed (`open_body.py`). That is right only for labels, cache hints and
fields that add to the response. If a constraint or a sampling method were dropped, the client would
get different text with status 200. So a known field of this kind is a 400 with advice. Clients send
many fields at their neutral values, and these values are accepted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.serve.errors import bad_request, short

NO_SUCH_SAMPLER = (
    "quire does not support this way of sampling; remove it, or use temperature, top_p or min_p"
)
NO_WATERMARKS = "quire does not add watermarks; remove it"
NO_ADAPTERS = "name the adapter in model; remove it"
CONSTRAINT = (
    "this endpoint does not support this constraint; use its own field for structured output"
)
NOT_THIS_ENDPOINT = "this endpoint does not support it; remove it"
IMAGES = "send images as image_url parts of messages"
EMPTY_VALUES: tuple[object, ...] = ("", [], {})


@dataclass(frozen=True)
class Refused:
    """Rule of a refused field. advice: help for the client; values: neutral values besides null."""

    advice: str
    values: tuple[object, ...] = ()

    def check(self, name: str, value: object) -> None:
        """Raise ApiError for a value that is not neutral. True is not 1, as in JSON."""
        is_bool = isinstance(value, bool)
        if value is None or any(
            value == each and is_bool == isinstance(each, bool) for each in self.values
        ):
            return
        raise bad_request(f"{name}={short(value)}: {self.advice}.", name, "unsupported_value")


def _all(names: str, advice: str, *values: object) -> dict[str, Refused]:
    return dict.fromkeys(names.split(), Refused(advice, (*EMPTY_VALUES, *values)))


# Fields of llama.cpp, SGLang, text-generation-inference and Ollama. At the end are fields of vLLM
# and OpenAI, for the bodies that lack them.
FOREIGN: Mapping[str, Refused] = {
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
    **_all("watermark watermarking", NO_WATERMARKS, False),
    **_all("format", "use response_format"),
    **_all("think", "use reasoning_effort, or chat_template_kwargs", True),
    **_all("raw", "use /v1/completions", False),
    **_all("grammar regex json_schema", CONSTRAINT),
    **_all("structured_outputs response_format", CONSTRAINT),
    **_all("guided_json guided_regex guided_choice", CONSTRAINT),
    **_all("guided_grammar structural_tag", CONSTRAINT),
    **_all("logit_bias bad_words allowed_token_ids stop stop_token_ids", NOT_THIS_ENDPOINT),
    **_all("logits_processors min_tokens use_beam_search best_of suffix", NOT_THIS_ENDPOINT),
    **_all("repetition_detection chat_template truncate_prompt_tokens", NOT_THIS_ENDPOINT),
    **_all("guided_whitespace_pattern", CONSTRAINT),
    **_all("thinking_token_budget", NOT_THIS_ENDPOINT, -1),
    **_all("n", NOT_THIS_ENDPOINT, 1),
    **_all("ignore_eos include_stop_str_in_output", NOT_THIS_ENDPOINT, False),
    **_all("frequency_penalty presence_penalty", NOT_THIS_ENDPOINT, 0),
    **_all("xtc_probability dry_multiplier", NOT_THIS_ENDPOINT, 0),
    **_all("functions", "use tools, which replaced it"),
}


# Fields of the same engines that cannot change the text, with the reason. They are removed like all
# unknown fields.
HARMLESS: Mapping[str, str] = {
    "cache_prompt id_slot keep_alive rid": "the server decides which blocks stay cached",
    "n_keep num_keep": "quire never shortens a context",
    "n_probs timings_per_token return_progress post_sampling_probs return_hidden_states"
    " decoder_input_details separate_reasoning stream_reasoning": "only adds to the response",
    "mirostat_tau mirostat_eta dynatemp_exponent smoothing_curve": "needs a field that is refused",
}


def check_foreign(body: Mapping[str, Any], unknown: tuple[str, ...]) -> None:
    """Raise ApiError for the first unknown field of a body that would change the text."""
    for name in unknown:
        if name in FOREIGN:
            FOREIGN[name].check(name, body[name])
