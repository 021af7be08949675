"""The table of fields: each field does what its declaration says (`serve/fields.py`).

Requests run in this process. Each test compares the engine's request and the client's response
with and without a field.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from quire.base.settings.config import ServerConfig
from quire.render.tokens.tokenizer import Tokenizer
from quire.serve.app import create_app
from quire.serve.bodies.open_body import body_class, check_neutral
from quire.serve.context import ApiContext
from quire.serve.errors import ApiError
from quire.serve.fields import (
    IGNORED,
    REFUSED,
    TAKEN,
    Row,
    bodies,
    is_of_other_engine,
    rows,
)
from tests.serve.api.conftest import small_engine
from tests.serve.fields_page import main
from tests.structure.test_house import ROOT
from tests.support.serve.fake_client import FakeClient

MAX_LINES, MAX_COLUMNS = 250, 120
MESSAGES = [{"role": "user", "content": "Hi"}]
OPTIONS = {"num_predict": 2, "temperature": 0.5, "seed": 1}
SAMPLING = {"max_new_tokens": 2, "temperature": 0.5, "sampling_seed": 1}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": MESSAGES, "max_tokens": 2, "temperature": 0.5, "seed": 1},
    "completions": {"prompt": "Hi", "max_tokens": 2, "temperature": 0.5, "seed": 1},
    "responses": {"input": "Hi", "max_output_tokens": 2, "temperature": 0.5, "seed": 1},
    "messages": {"messages": MESSAGES, "max_tokens": 2, "temperature": 0.5, "seed": 1},
    "messages/count_tokens": {"messages": MESSAGES},
    "api/chat": {"messages": MESSAGES, "stream": False, "options": OPTIONS},
    "api/generate": {"prompt": "Hi", "stream": False, "options": OPTIONS},
    "api/... options": OPTIONS,
    "completion": {"prompt": "Hi", "n_predict": 2, "temperature": 0.5, "seed": 1},
    "apply-template": {"messages": MESSAGES},
    "generate": {"text": "Hi", "sampling_params": SAMPLING},
    "generate sampling_params": SAMPLING,
    "tokenize": {"messages": MESSAGES},
    "detokenize": {"tokens": [10, 11]},
    "requests/ID/fork": {"max_tokens": 2, "temperature": 0.5, "seed": 1},
    "requests/ID/append": {"max_tokens": 2, "temperature": 0.5, "seed": 1},
}
# Fields that sessions add to those of completions.
SESSION_FIELDS = {"at_token", "index", "keep_source", "token_ids", "messages", "prompt"}
ROWS = [
    row
    for row in rows()
    if row.api in BODIES
    and (not row.api.startswith("requests") or row.fate == REFUSED or row.field in SESSION_FIELDS)
]


@dataclass(frozen=True)
class Sample:
    """A value other than the default. others: fields that this field requires."""

    value: Any
    others: Mapping[str, Any] = field(default_factory=dict)


FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
ITEM_TOOLS = [{"type": "function", **FUNCTION}]
CUSTOM_TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]
# Renders every variable of a chat template, and makes the model reason.
TEMPLATE = (
    "{{ tools }}{{ documents }}{{ x }}{{ reasoning_effort }}{{ enable_thinking }}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}.\n{% endfor %}"
    "{% if add_generation_prompt %}<think>\n{% endif %}"
)
ASSISTANT = [*MESSAGES, {"role": "assistant", "content": "Once"}]
BEAMS = {"use_beam_search": True, "temperature": None, "seed": None}
LOGPROBS = ["message.output_text.logprobs"]
SCHEMA = {"type": "object"}
TEXT_FORMAT = {"type": "json_schema", "name": "a", "schema": SCHEMA}
# Keyed by field, or by API and field.
SAMPLES: dict[str, Sample] = {
    "add_generation_prompt": Sample(False),
    "add_special_tokens": Sample(True),
    "completions add_special_tokens": Sample(False),
    "allowed_token_ids": Sample([5]),
    "at_token": Sample(1),
    "background": Sample(True),
    "bad_words": Sample(["fox"]),
    "beam_width": Sample(3, BEAMS),
    "best_of": Sample(3),
    "cache_salt": Sample("salt"),
    "chat_template": Sample(f"{TEMPLATE}<think>"),
    "chat_template_kwargs": Sample({"x": 5}),
    "continue_final_message": Sample(
        True, {"messages": ASSISTANT, "add_generation_prompt": False}
    ),
    "documents": Sample([{"text": "a"}]),
    "dry_allowed_length": Sample(3, {"dry_multiplier": 1.0}),
    "dry_base": Sample(2.0, {"dry_multiplier": 1.0}),
    "dry_multiplier": Sample(0.5),
    "dry_penalty_last_n": Sample(9, {"dry_multiplier": 1.0}),
    "dry_sequence_breakers": Sample(["x"], {"dry_multiplier": 1.0}),
    "early_stopping": Sample("never", BEAMS),
    "ebnf": Sample('root ::= "a"'),
    "echo": Sample(True, {"messages": ASSISTANT}),
    "completions echo": Sample(True),
    "frequency_penalty": Sample(0.5),
    "grammar": Sample('root ::= "a"'),
    "guided_choice": Sample(["a", "b"]),
    "guided_grammar": Sample('root ::= "a"'),
    "guided_json": Sample(SCHEMA),
    "guided_regex": Sample("a"),
    "guided_whitespace_pattern": Sample("[ ]?", {"guided_json": SCHEMA}),
    "ignore_eos": Sample(True),
    "include": Sample(LOGPROBS),
    "include_reasoning": Sample(False),
    "include_stop_str_in_output": Sample(True),
    "index": Sample(1),
    "input": Sample("Ho"),
    "instructions": Sample("Be brief."),
    "json_schema": Sample(SCHEMA),
    "keep_s": Sample(1.0),
    "keep_source": Sample(True),
    "lora": Sample([{"id": 0, "scale": 0.5}]),
    "kv_transfer_params": Sample({"do_remote_decode": True}),
    "length_penalty": Sample(0.5, BEAMS),
    "logit_bias": Sample({"5": 1}),
    "logits_processors": Sample(["x"]),
    "logprob_token_ids": Sample([5]),
    "logprobs": Sample(True),
    "completions logprobs": Sample(1),
    "max_completion_tokens": Sample(3),
    "max_output_tokens": Sample(3),
    "max_tokens": Sample(3),
    "max_tool_calls": Sample(2),
    "messages": Sample([{"role": "user", "content": "Who are you, old fox?"}]),
    "metadata": Sample({"a": "b"}),
    "messages metadata": Sample({"user_id": "me"}),
    "min_p": Sample(0.5),
    "min_tokens": Sample(1),
    "model": Sample("other"),
    "n": Sample(2),
    "output_config": Sample({"effort": "low"}),
    "parallel_tool_calls": Sample(False, {"tools": TOOLS, "tool_choice": "required"}),
    "responses parallel_tool_calls": Sample(
        False, {"tools": ITEM_TOOLS, "tool_choice": "required"}
    ),
    "presence_penalty": Sample(0.5),
    "previous_response_id": Sample("resp_none"),
    "prompt": Sample("Ho"),
    "tokenize prompt": Sample("Ho", {"messages": None}),
    "messages cache_control": Sample({"type": "ephemeral"}),
    "prompt_cache_key": Sample("key"),
    "prompt_cache_retention": Sample("24h"),
    "prompt_logprobs": Sample(1),
    "reasoning": Sample({"effort": "low"}),
    "reasoning_effort": Sample("low"),
    "regex": Sample("a"),
    "repetition_detection": Sample({"max_pattern_size": 9, "min_count": 3}),
    "repetition_penalty": Sample(1.5),
    "response_format": Sample({"type": "json_object"}),
    "data_parallel_rank": Sample(0),
    "extra_key": Sample("key"),
    "input_ids": Sample([12, 13], {"text": None}),
    "generate text": Sample("Ho"),
    "logprob_start_len": Sample(0, {"return_logprob": True}),
    "generate return_logprob": Sample(True),
    "return_text_in_logprobs": Sample(True, {"return_logprob": True}),
    "top_logprobs_num": Sample(2, {"return_logprob": True}),
    "sampling_params": Sample(SAMPLING | {"top_k": 7}),
    "max_new_tokens": Sample(3),
    "min_new_tokens": Sample(1),
    "no_stop_trim": Sample(True),
    "sampling_seed": Sample(7),
    "structural_tag": Sample({"format": {"type": "const_string", "value": "a"}}),
    "return_token_ids": Sample(True),
    "return_token_strs": Sample(True),
    "return_tokens_as_token_ids": Sample(True, {"logprobs": True}),
    "completions return_tokens_as_token_ids": Sample(True, {"logprobs": 1}),
    "safety_identifier": Sample("me"),
    "seed": Sample(7),
    "skip_special_tokens": Sample(False),
    "spaces_between_special_tokens": Sample(False),
    "stop": Sample(["zz"]),
    "stop_sequences": Sample(["zz"]),
    "stop_token_ids": Sample([9]),
    "store": Sample(False),
    "stream": Sample(True),
    "stream_interval": Sample(4),
    "stream_options": Sample({"include_usage": True}, {"stream": True}),
    "structured_outputs": Sample({"regex": "a"}),
    "suffix": Sample("end"),
    "system": Sample("Be brief."),
    "temperature": Sample(0.9),
    "text": Sample({"format": TEXT_FORMAT}),
    "thinking": Sample({"type": "disabled"}),
    "thinking_token_budget": Sample(3),
    "timeout_s": Sample(60.0),
    "token_ids": Sample([9]),
    "tokens": Sample([12, 13]),
    "tool_choice": Sample("required", {"tools": TOOLS}),
    "responses tool_choice": Sample("required", {"tools": ITEM_TOOLS}),
    "messages tool_choice": Sample({"type": "any"}, {"tools": CUSTOM_TOOLS}),
    "messages/count_tokens tool_choice": Sample({"type": "none"}, {"tools": CUSTOM_TOOLS}),
    "tools": Sample(TOOLS),
    "responses tools": Sample(ITEM_TOOLS),
    "messages tools": Sample(CUSTOM_TOOLS),
    "messages/count_tokens tools": Sample(CUSTOM_TOOLS),
    "api/chat stream": Sample(True),
    "api/chat think": Sample(False),
    "api/generate think": Sample(False),
    "api/generate images": Sample(["iVBORw0KGgo="]),
    "api/generate raw": Sample(True),
    "api/chat top_logprobs": Sample(2, {"logprobs": True}),
    "format": Sample("json"),
    "completion n_probs": Sample(2),
    "add_special": Sample(True, {"messages": None, "content": "Ho"}),
    "content": Sample("Ho", {"messages": None}),
    "with_pieces": Sample(True, {"messages": None, "content": "Ho"}),
    "n_predict": Sample(3),
    "response_fields": Sample(["content"]),
    "return_tokens": Sample(True),
    "t_max_predict_ms": Sample(1, {"grammar": 'root ::= "\\n" [a-z]{60}', "n_predict": 70}),
    "samplers": Sample(["top_k"]),
    "num_ctx": Sample(200, {"num_predict": None, "stop": ["a"]}),
    "num_predict": Sample(3),
    "options": Sample(OPTIONS | {"top_k": 7, "stop": ["zz"]}),
    "repeat_last_n": Sample(0, {"repeat_penalty": 1.5}),
    "repeat_penalty": Sample(1.5),
    "top_k": Sample(7),
    "top_logprobs": Sample(2, {"logprobs": True}),
    "responses top_logprobs": Sample(2, {"include": LOGPROBS}),
    "top_p": Sample(0.5),
    "truncate_prompt_tokens": Sample(1),
    "truncation": Sample("auto", {"input": "word " * 600}),
    "truncation_side": Sample("right", {"truncate_prompt_tokens": 2}),
    "use_beam_search": Sample(True, BEAMS | {"n": 2, "use_beam_search": None}),
    "user": Sample("me"),
    "priority": Sample(3),
    "xtc_probability": Sample(0.5),
    "xtc_threshold": Sample(0.2, {"xtc_probability": 0.5}),
}  # fmt: skip
# Taken if the model and the server support them. The demo model and this server do not: they refuse
# the sample with an error that names the field.
UNAVAILABLE = {"suffix", "logits_processors", "previous_response_id", "images", "lora"}
UNUSUAL = {"whole number": 5, "text": "x"}
ID_OR_TIME = re.compile(r'"created(_at)?":\d+|\b[a-z]+[-_][0-9a-f]{16,}\b')
VARYING = {
    "id", "created", "created_at", "completed_at", "usage", "total_duration", "load_duration",
    "prompt_eval_duration", "eval_duration", "e2e_latency", "timings", "tokens_cached",
}  # fmt: skip


def sample_of(row: Row) -> Sample:
    found = SAMPLES.get(f"{row.api} {row.field}") or SAMPLES.get(row.field)
    assert found is not None, f"add a sample for {row.api} {row.field}"
    return found


def path_of(api: str) -> str:
    is_short = api.endswith("tokenize") or is_of_other_engine(api)
    return f"/{api}" if is_short else f"/v1/{api}"


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in VARYING}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def observed(api: TestClient, context: ApiContext, name: str, body: Any) -> dict[str, Any]:
    """Return fields of the engine's request, and the response, for a request with this body."""
    client: Any = context.client
    client.requests.clear()
    given = {key: value for key, value in body.items() if value is not None}
    if name == "api/... options":
        name, given = "api/chat", {"messages": MESSAGES, "stream": False, "options": given}
    if name == "generate sampling_params":
        name, given = "generate", {"text": "Hi", "sampling_params": given}
    path = path_of(name)
    if "/ID/" in path:
        retained = {"prompt": "Hi", "max_tokens": 2, "keep_s": 60, "n": 2, "seed": 1}
        path = path.replace("ID", api.post("/v1/completions", json=retained).json()["id"])
        client.requests.clear()
    answer = api.post(path, json=given)
    is_json = answer.headers["content-type"] == "application/json"
    value = without_ids(answer.json()) if is_json else ID_OR_TIME.sub("", answer.text)
    found: dict[str, Any] = {"status": answer.status_code, "response": value}
    error = answer.json().get("error") if is_json and answer.status_code >= 400 else None
    found["error"] = {"message": error} if isinstance(error, str) else error
    found["model"] = answer.status_code == 404
    found["prompt"] = value if "token" in name or name == "apply-template" else None
    if client.requests:
        request = client.requests[-1]
        found |= {f"Request.{key}": each for key, each in msgspec.structs.asdict(request).items()}
        params = msgspec.structs.asdict(request.params)
        found |= {f"SamplingParams.{key}": each for key, each in params.items()}
        found["SamplingParams"] = params
        found["prompt"], found["grammar"] = request.prompt_token_ids, request.grammar
        if request.fork is not None:
            fork = msgspec.structs.asdict(request.fork)
            found |= {f"Fork.{key}": each for key, each in fork.items()}
    return found


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[TestClient, ApiContext]]:
    engine = small_engine(chat_template=TEMPLATE)
    config = ServerConfig(trust_request_chat_template=True)
    context = ApiContext(FakeClient(engine), engine.renderer, engine.requests, ("demo",), config, 0)
    try:
        with TestClient(create_app(context), raise_server_exceptions=False) as client:
            yield client, context
    finally:
        engine.client.close()


@pytest.fixture(autouse=True)
def special_token_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add token 3 as a special token before each text, because the demo model has none there."""
    encode = Tokenizer.encode

    def with_special(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = encode(self, text, add_special_tokens)
        return [3, *ids] if add_special_tokens else ids

    monkeypatch.setattr(Tokenizer, "encode", with_special)


@pytest.mark.parametrize("name", BODIES)
def test_taken_fields_set_what_they_declare(
    served: tuple[TestClient, ApiContext], name: str
) -> None:
    plain = observed(*served, name, BODIES[name])
    for row in ROWS:
        if row.api != name or row.fate != TAKEN:
            continue
        sample = sample_of(row)
        body = BODIES[name] | dict(sample.others)
        changed = observed(*served, name, body | {row.field: sample.value})
        if row.field in UNAVAILABLE:
            assert changed["status"] in (400, 404), row
            error = changed["error"]
            blamed = error.get("param", error["message"].partition("[")[0].partition(":")[0])
            assert blamed == row.field, (row, error)
            continue
        before = observed(*served, name, body) if sample.others else plain
        if row.becomes != ("model",):
            assert changed["status"] == 200, (row, changed["response"])
        for part in row.becomes:
            assert changed.get(part) != before.get(part), (row, changed.get(part))


@pytest.mark.parametrize("name", BODIES)
def test_ignored_fields_change_nothing(served: tuple[TestClient, ApiContext], name: str) -> None:
    ignored = {row.field: {"a": 1} for row in ROWS if row.api == name and row.fate == IGNORED}
    plain = observed(*served, name, BODIES[name])
    with_all = observed(*served, name, BODIES[name] | ignored)
    changes = {key for key, value in plain.items() if with_all[key] != value}
    assert changes <= {"Request.request_id", "Request.fork", "Fork.request_id"}
    assert with_all["status"] == 200


@pytest.mark.parametrize("name", BODIES)
def test_refused_fields_give_400_with_name_and_advice(
    served: tuple[TestClient, ApiContext], name: str
) -> None:
    for row in ROWS:
        if row.api == name and row.fate == REFUSED:
            value = UNUSUAL.get(row.type, {"b": 1})
            error = observed(*served, name, BODIES[name] | {row.field: value})["error"]
            assert error["message"].startswith(f"{row.field}="), row
            assert row.advice in error["message"]
            assert name.startswith(("messages", "api/")) or error["param"] == row.field


def test_refused_fields_are_accepted_only_at_neutral_values() -> None:
    kinds = bodies()
    refused = [row for row in rows() if row.fate == REFUSED]
    assert {row.api for row in refused} >= {"embeddings", "score", "rerank", "stream"}
    for row in refused:
        assert row.advice and "not supported" not in row.advice, f"explain the refusal: {row}"
        kind = kinds[row.api]
        for value in (None, *row.values):
            check_neutral(kind.model_construct(**{row.field: value}))
        with pytest.raises(ApiError) as error:
            check_neutral(kind.model_construct(**{row.field: {"b": 1}}))
        assert (error.value.status, error.value.param) == (400, row.field)


def test_equal_requests_give_equal_streams(served: tuple[TestClient, ApiContext]) -> None:
    body = BODIES["completions"] | {"stream": True}
    first, second = (observed(*served, "completions", body)["response"] for _ in range(2))
    assert first == second and "data: " in first


def test_field_table_covers_every_body_of_the_app(served: tuple[TestClient, ApiContext]) -> None:
    app: Any = served[0].app
    routes = [route for route in app.routes if isinstance(route, Route)]
    kinds = {body_class(route.endpoint) for route in routes} - {None}
    assert kinds <= set(bodies().values())


def test_field_pages_are_up_to_date(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 0
    for name, is_native in (
        ("fields.md", False),
        ("fields-native.md", True),
    ):
        text = (tmp_path / name).read_text("utf-8")
        assert (ROOT / "docs" / "use" / name).read_text("utf-8") == text, "run `make fields`"
        lines = text.splitlines()
        assert len(lines) <= MAX_LINES
        assert all(len(line) <= MAX_COLUMNS for line in lines if not line.startswith("|"))
        here = {api for api in bodies() if is_of_other_engine(api) == is_native}
        inherited = {  # the page refers to the other page's body for these
            (api, field)
            for api, kind in bodies().items()
            for other, base in bodies().items()
            if api in here and other not in here and issubclass(kind, base)
            for field in base.model_fields
        }
        assert is_native or not inherited
        named = {
            row.field for row in rows() if row.api in here and (row.api, row.field) not in inherited
        }
        assert all(f"`{field}`" in text for field in named), json.dumps(sorted(named))
