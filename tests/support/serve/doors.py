"""The doors by which requests enter an engine in this process, each as a function from fields to a
refusal.

A door has its own names of fields (`names`). It lists the fields that it cannot express (`cannot`)
and the bad requests that are good ones there (`fits`), each with the reason.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from starlette.testclient import TestClient

from quire import LLM, AsyncLLM, PoolingParams, SamplingParams
from quire.base.errors import QuireError
from quire.base.requests.repetition import RepetitionDetectionParams
from quire.base.requests.structured_outputs import StructuredOutputsParams
from quire.base.settings.config import ServerConfig
from quire.engine.start.text import TextSide
from quire.serve.anthropic.protocol import MessagesRequest
from quire.serve.app import create_app
from quire.serve.async_renderer import TextThreads
from quire.serve.batches.app_caller import AppCaller
from quire.serve.bodies.pooling_protocol import (
    ClassifyBody,
    EmbeddingBody,
    RerankBody,
    ScoreBody,
)
from quire.serve.bodies.protocol import ChatCompletionRequest, CompletionRequest
from quire.serve.context import ApiContext
from quire.serve.errors import as_api_error
from quire.serve.native.prefixes import PrefixBody
from quire.serve.native.sessions import AppendBody, ForkBody
from quire.serve.python.beam_search import BeamSearchParams
from quire.serve.responses.body import ResponsesRequest
from tests.support.serve.fake_client import FakeClient

Fields = dict[str, Any]
MODEL = "small"
SHORT = {"max_tokens": 4}
# What a WebSocket does not tell, by the error's code.
STATUSES = {"model_not_found": 404, "priority_not_allowed": 403, "draining": 503}
LOGPROBS = {"include": ["message.output_text.logprobs"]}

# ---- what doors have no word for -------------------------------------------------------------

PINS = {"ttl_s pin_share": "only prefixes are pinned"}
IS_KEY = {"tenant": "the tenant of an HTTP request is its key, or a digest of its user"}
SERVER = {"pin_share": "a setting of the server"}
OUTPUTS = (
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed"
    " logit_bias allowed_token_ids bad_words dry_multiplier dry_base dry_allowed_length"
    " dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold logits_processors n"
    " best_of use_beam_search beam_width length_penalty early_stopping max_tokens min_tokens stop"
    " stop_token_ids repetition_detection logprobs prompt_logprobs logprob_token_ids"
    " stream_interval structured_outputs kv_transfer_params thinking_token_budget"
    " prompt_logprob_token_ids prompt_logprob_start truncate_prompt_tokens truncation_side keep_s"
)
CHAT = {
    "prompt_token_ids": "a conversation is text",
    "best_of prompt_logprob_token_ids prompt_logprob_start": "OpenAI's chats have no such field",
}
NO_NAMED_PROMPT = {
    "prompt_logprob_token_ids prompt_logprob_start": "/v1/completions has no such field",
}
RESPONSES = {
    "prompt_token_ids": "a conversation is text",
    "n best_of use_beam_search beam_width length_penalty early_stopping": "there is one answer",
    "dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers"
    " xtc_probability xtc_threshold logits_processors prompt_logprobs logprob_token_ids"
    " prompt_logprob_token_ids prompt_logprob_start stream_interval truncate_prompt_tokens"
    " truncation_side": "OpenAI's API has no such field, and quire adds none",
    "kv_transfer_params": "refused whatever it holds",
}
MESSAGES = {
    "prompt_token_ids": "a conversation is text",
    "n best_of use_beam_search beam_width length_penalty early_stopping": "a message is one answer",
    "presence_penalty frequency_penalty logit_bias allowed_token_ids bad_words dry_multiplier"
    " dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_probability"
    " xtc_threshold logits_processors min_tokens stop_token_ids repetition_detection logprobs"
    " prompt_logprobs logprob_token_ids prompt_logprob_token_ids prompt_logprob_start"
    " stream_interval truncate_prompt_tokens truncation_side keep_s kv_transfer_params"
    " structured_outputs thinking_token_budget": "Anthropic's API has no such field, and quire adds"
    " none",
}
OLLAMA = {
    "prompt_token_ids": "a prompt is text",
    "n best_of use_beam_search beam_width length_penalty early_stopping": "there is one answer",
    "max_tokens": "num_predict below 1 is what fits, and one above it is reduced",
    "logprobs": "the number is top_logprobs, as in chats",
    "logit_bias allowed_token_ids bad_words dry_multiplier dry_base dry_allowed_length"
    " dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold logits_processors"
    " min_tokens stop_token_ids repetition_detection prompt_logprobs logprob_token_ids"
    " prompt_logprob_token_ids prompt_logprob_start stream_interval truncate_prompt_tokens"
    " truncation_side keep_s kv_transfer_params structured_outputs thinking_token_budget": "Ollama"
    " has no such field, and quire adds none",
}
NATIVE = {
    "n best_of use_beam_search beam_width length_penalty early_stopping": "there is one answer",
    "max_tokens": "n_predict below 0 is what fits, and one above it is reduced",
    "logprobs": "n_probs begins at 0",
    "allowed_token_ids bad_words logits_processors min_tokens stop_token_ids repetition_detection"
    " prompt_logprobs logprob_token_ids prompt_logprob_token_ids prompt_logprob_start"
    " stream_interval truncate_prompt_tokens truncation_side keep_s kv_transfer_params"
    " structured_outputs thinking_token_budget": "llama.cpp has no such field, and quire adds none",
}
SGLANG = {
    "best_of use_beam_search beam_width length_penalty early_stopping": "SGLang has no such field",
    "logprobs prompt_logprobs": "the number is top_logprobs_num, which begins at 0",
    "allowed_token_ids bad_words dry_multiplier dry_base dry_allowed_length dry_penalty_last_n"
    " dry_sequence_breakers xtc_probability xtc_threshold logits_processors repetition_detection"
    " logprob_token_ids prompt_logprob_token_ids prompt_logprob_start truncate_prompt_tokens"
    " truncation_side keep_s kv_transfer_params thinking_token_budget structured_outputs": "SGLang"
    " has no such field, and quire adds none",
}
SGLANG_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "sampling_seed", "stop", "logit_bias", "n", "max_new_tokens",
    "min_new_tokens", "stop_token_ids", "stream_interval",
)  # fmt: skip
OLLAMA_OPTIONS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repeat_penalty", "seed", "stop",
)  # fmt: skip
ONE_OUTPUT = {
    "n best_of use_beam_search beam_width length_penalty early_stopping": "several outputs are"
    " refused, whatever else is set",
}
OPEN = ONE_OUTPUT | {
    "prompt_logprobs prompt_logprob_token_ids prompt_logprob_start truncate_prompt_tokens"
    " truncation_side": "refused whatever it is, since the prompt is computed as it comes",
}
BEHIND = {
    "truncate_prompt_tokens truncation_side": "tokens of a held request cannot be cut",
}
LOCAL = {
    "model": "one engine has one model",
    "tenant": "a program with an LLM is alone",
    "timeout_s": "a program ends its own calls",
    "data_parallel_rank": "an LLM chooses the core",
}
NO_PRIORITY = {"priority": "the program waits for this request alone"}
NO_KEEP = {"keep_s": "sessions hold requests"}
AN_ASYNC = {"model": "one engine has one model"}
POOLED = {"temperature": "a model that pools samples nothing"}
KEPT = {
    "best_of use_beam_search beam_width length_penalty early_stopping": "the answer is held, which"
    " excludes them",
}
EMPTY_TEXT = {"no text": "a message may be empty: its template is not"}
NOTHING_ADDED = dict.fromkeys(("no text", "no ids"), "nothing need follow a held request")


def because(*reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the reason for each field: keys hold several names."""
    return {name: why for each in reasons for names, why in each.items() for name in names.split()}


# ---- doors -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """What a caller is told. param: without the place inside of a field, "" for none."""

    status: int
    param: str
    code: str | None
    message: str


@dataclass(frozen=True)
class Door:
    """knock: sends fields in the door's own words; None if they are accepted. path: of HTTP.
    has_params: its errors name fields and codes apart from the message."""

    name: str
    knock: Callable[[Fields], Refusal | None]
    names: Mapping[str, str] = field(default_factory=dict)
    cannot: Mapping[str, str] = field(default_factory=dict)
    fits: Mapping[str, str] = field(default_factory=dict)
    path: str = ""
    has_params: bool = True

    @property
    def is_python(self) -> bool:
        return not self.path

    def own_name(self, name: str) -> str:
        return self.names.get(name, name)

    def refusal(self, fields: Fields) -> Refusal | None:
        """Send fields in the cases' words."""
        return self.knock({self.own_name(name): value for name, value in fields.items()})


def refused(status: int, error: Fields | str) -> Refusal:
    if isinstance(error, str):  # Ollama's
        return Refusal(status, "", None, error)
    param = str(error.get("param") or "").removeprefix("sampling_params.")
    param = param.partition("[")[0].partition(".")[0]
    return Refusal(status, param, error.get("code"), error["message"])


class App:
    """Sends bodies to an app as the lines of a batch are sent, and HTTP requests in the end."""

    def __init__(
        self, client: FakeClient, runner: asyncio.Runner, key: str | None = None, **server: Any
    ) -> None:
        engine, config = client.engine, ServerConfig(**server)
        self.context = ApiContext(client, engine.renderer, engine.requests, (MODEL,), config, 0)
        self.app, self._runner, self.key = create_app(self.context), runner, key

    def post(self, path: str, body: Fields) -> Refusal | Any:
        """Return a refusal, or the answer."""
        caller = AppCaller(self.app, self.key)
        core = body.pop("data_parallel_rank", None)
        if core is not None:
            caller._headers.append((b"x-data-parallel-rank", str(core).encode()))
        reply = self._runner.run(caller.post(path, json.dumps(body).encode()))
        if reply.status < 400:
            return reply.body
        return refused(reply.status, json.loads(reply.body)["error"])

    def door(
        self, path: str, base: Fields, change: Callable[[Fields], Fields] | None = None
    ) -> Any:
        """Return a function that posts fields together with these; None if they are accepted."""

        def knock(fields: Fields) -> Refusal | None:
            body = base | fields
            found = self.post(path, body if change is None else change(body))
            return found if isinstance(found, Refusal) else None

        return knock

    def stream(self, fields: Fields) -> Refusal | None:
        """Send an open prompt whose first piece is the last."""
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        with TestClient(self.app, headers=headers).websocket_connect("/v1/stream") as line:
            start = {"type": "start", "prompt": "fox", "last": True, **SHORT, **fields}
            line.send_text(json.dumps(start))
            while (message := line.receive_json())["type"] not in ("error", "done"):
                pass
        if message["type"] == "done":
            return None
        return refused(STATUSES.get(message["error"]["code"], 400), message["error"])


def _in_messages(body: Fields) -> Fields:
    body["messages"] = [{"role": "user", "content": body["messages"]}]
    if "top_logprobs" in body:
        body["logprobs"] = True
    return body


def _in_content(body: Fields) -> Fields:
    return {"content": "fox"} | body


def _with_options(body: Fields) -> Fields:
    options = {name: body.pop(name) for name in OLLAMA_OPTIONS if name in body}
    return body | {"options": options | {"num_predict": 4}}


def _with_sampling(body: Fields) -> Fields:
    sampling = {name: body.pop(name) for name in SGLANG_SAMPLING if name in body}
    if "input_ids" not in body:
        body = {"text": "fox"} | body
    return body | {"sampling_params": {"max_new_tokens": 4} | sampling}


def _with_chat_options(body: Fields) -> Fields:
    return _with_options(_in_messages(body))


def _behind(body: Fields) -> Fields:
    return body if "token_ids" in body else {"prompt": " and"} | body


def _in_text_1(body: Fields) -> Fields:
    return {"text_1": "fox"} | body


def http_doors(app: App, held_id: str) -> list[Door]:
    """Return the routes that generate. held_id: a held request, to be continued."""
    ids = {"prompt_token_ids": "prompt"}
    base = {"prompt": "fox"} | SHORT
    chat = {"messages": "fox"} | SHORT
    anthropic = chat | {"model": MODEL}
    name = {"prompt": "messages"}
    response = {"input": "fox", "max_output_tokens": 4} | LOGPROBS
    of_response = {
        "prompt": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs",
    }  # fmt: skip
    fork, append = (f"/v1/requests/{held_id}/{what}" for what in ("fork", "append"))
    behind = because(PINS, IS_KEY, NO_NAMED_PROMPT, BEHIND, {
        "data_parallel_rank": "the core that holds the request",
    })  # fmt: skip
    added = {"prompt_token_ids": "token_ids"}
    only_pins = because(IS_KEY, SERVER, {OUTPUTS: "a prefix has no output"}, {
        "priority timeout_s data_parallel_rank": "a prefix is pinned on every core, at once",
    })  # fmt: skip
    return [
        Door("completions", app.door("/v1/completions", base), ids,
             because(PINS, IS_KEY, NO_NAMED_PROMPT), path="/v1/completions"),
        Door("chat", app.door("/v1/chat/completions", chat, _in_messages),
             name | {"logprobs": "top_logprobs"}, because(PINS, IS_KEY, CHAT), EMPTY_TEXT,
             "/v1/chat/completions"),
        Door("responses", app.door("/v1/responses", response), of_response,
             because(PINS, IS_KEY, RESPONSES), EMPTY_TEXT, "/v1/responses"),
        Door("messages", app.door("/v1/messages", anthropic, _in_messages),
             name | {"stop": "stop_sequences"}, because(PINS, IS_KEY, MESSAGES), EMPTY_TEXT,
             "/v1/messages", has_params=False),
        Door("ollama chat", app.door("/api/chat", {"messages": "fox"}, _with_chat_options),
             name | {"repetition_penalty": "repeat_penalty"}, because(PINS, IS_KEY, OLLAMA),
             EMPTY_TEXT, "/api/chat", has_params=False),
        Door("ollama generate", app.door("/api/generate", {"prompt": "fox", "raw": True},
             _with_options), {"repetition_penalty": "repeat_penalty"},
             because(PINS, IS_KEY, OLLAMA), {"no text": "it loads the model"}, "/api/generate",
             has_params=False),
        Door("llama.cpp", app.door("/completion", {"prompt": "fox", "n_predict": 4}),
             ids | {"repetition_penalty": "repeat_penalty"}, because(PINS, IS_KEY, NATIVE),
             path="/completion"),
        Door("sglang", app.door("/generate", {}, _with_sampling),
             {"prompt": "text", "prompt_token_ids": "input_ids", "seed": "sampling_seed",
              "max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"},
             because(PINS, IS_KEY, SGLANG), path="/generate"),
        Door("lm studio chat", app.door("/api/v0/chat/completions", chat, _in_messages),
             name | {"logprobs": "top_logprobs"}, because(PINS, IS_KEY, CHAT),
             EMPTY_TEXT | {"max_tokens below 0": "-1 is what fits, as LM Studio's clients send it"},
             "/api/v0/chat/completions"),
        Door("lm studio", app.door("/api/v0/completions", base), ids,
             because(PINS, IS_KEY, NO_NAMED_PROMPT), path="/api/v0/completions"),
        Door("stream", app.stream, ids, because(PINS, IS_KEY, NO_NAMED_PROMPT, OPEN, {
            "data_parallel_rank": "a header of the connection, which holds for all its requests",
        }), path="/v1/stream"),
        Door("fork", app.door(fork, SHORT, _behind), added, behind, NOTHING_ADDED,
             "/v1/requests/{request_id}/fork"),
        Door("append", app.door(append, SHORT | {"keep_source": True}, _behind), added,
             behind | because(KEPT), NOTHING_ADDED, "/v1/requests/{request_id}/append"),
        Door("prefixes", app.door("/v1/prefixes", {"prompt": "fox"}), ids, only_pins,
             path="/v1/prefixes"),
    ]  # fmt: skip


BODIES = {
    "completions": CompletionRequest, "chat": ChatCompletionRequest, "responses": ResponsesRequest,
    "messages": MessagesRequest, "stream": CompletionRequest, "fork": ForkBody,
    "append": AppendBody, "prefixes": PrefixBody, "embeddings": EmbeddingBody,
    "classify": ClassifyBody, "score": ScoreBody, "rerank": RerankBody,
}  # fmt: skip


def pooling_doors(app: App) -> list[Door]:
    """Return the routes of a model that embeds."""
    ids = {"prompt_token_ids": "input", "prompt": "input"}
    texts = {"prompt_token_ids": "pairs are texts"}
    rerank = app.door("/rerank", {"query": "fox", "documents": "fox"}, lambda body: body | {
        "documents": [body["documents"]],
    })  # fmt: skip
    embed = {"prompt": "input", "prompt_token_ids": "input"}
    cut = {
        "truncate_prompt_tokens truncation_side": "truncate is a switch",
    }  # fmt: skip
    return [
        Door("ollama embed", app.door("/api/embed", {"input": "fox", "truncate": False}), embed,
             because(POOLED, IS_KEY, cut), {"no ids": "nothing to embed"}, "/api/embed",
             has_params=False),
        Door("ollama embeddings", app.door("/api/embeddings", {"prompt": "fox"}), {},
             because(POOLED, IS_KEY, texts, cut), {"text too long": "it is cut"},
             "/api/embeddings", has_params=False),
        Door("llama.cpp embedding", app.door("/embedding", {}, _in_content),
             {"prompt": "content", "prompt_token_ids": "content"}, because(POOLED, IS_KEY, cut),
             path="/embedding"),
        Door("embeddings", app.door("/v1/embeddings", {"input": "fox"}), ids,
             because(POOLED, IS_KEY), path="/v1/embeddings"),
        Door("lm studio embeddings", app.door("/api/v0/embeddings", {"input": "fox"}), ids,
             because(POOLED, IS_KEY), path="/api/v0/embeddings"),
        Door("score", app.door("/v1/score", {"text_2": "fox"}, _in_text_1), {"prompt": "text_2"},
             because(POOLED, IS_KEY, texts), path="/v1/score"),
        Door("rerank", rerank, {"prompt": "documents"}, because(POOLED, IS_KEY, texts),
             path="/rerank"),
    ]  # fmt: skip


# ---- Python ----------------------------------------------------------------------------------

OF_PROMPT = ("prompt", "prompt_token_ids", "cache_salt", "multi_modal_data")


def taken(fields: Fields, *names: str) -> Fields:
    """Take these out of fields."""
    return {name: fields.pop(name) for name in names if name in fields}


def prompt_of(fields: Fields) -> Fields:
    """Take the prompt out of fields."""
    found = taken(fields, *OF_PROMPT)
    return found if found.keys() - {"cache_salt"} else {"prompt": "fox", **found}


def params_of(fields: Fields) -> SamplingParams:
    """Make parameters of what is left of fields."""
    made = SHORT | fields
    for name, kind in (
        ("structured_outputs", StructuredOutputsParams),
        ("repetition_detection", RepetitionDetectionParams),
    ):
        if isinstance(made.get(name), dict):
            made[name] = kind(**made[name])
    if "kv_transfer_params" in made:
        made["extra_args"] = taken(made, "kv_transfer_params")
    return SamplingParams(**made)


def door(name: str, call: Callable[[Fields], Any], *cannot: Mapping[str, str], **more: Any) -> Door:
    """Return the door of a call, which tells of what it raises."""

    def knock(fields: Fields) -> Refusal | None:
        try:
            call(dict(fields))
        except QuireError as error:
            return refused(as_api_error(error).status, as_api_error(error).body()["error"])
        return None

    return Door(name, knock, cannot=because(*cannot), **more)


def llm_doors(llm: LLM) -> list[Door]:
    """Return the calls of an `LLM` that generate."""

    def generate(fields: Fields) -> None:
        prompt, priority = prompt_of(fields), [fields.pop("priority", 0)]
        llm.generate([prompt], params_of(fields), use_tqdm=False, priority=priority)

    def chat(fields: Fields) -> None:
        messages = [{"role": "user", "content": fields.pop("prompt", "fox")}]
        llm.chat(messages, params_of(fields), use_tqdm=False)

    def stream(fields: Fields) -> None:
        prompt = prompt_of(fields)
        list(llm.stream(prompt, params_of(fields)))

    def session(fields: Fields) -> None:
        own = taken(fields, "keep_s", "cache_salt")
        prompt = prompt_of(fields)
        with llm.session(**own) as begun:
            begun.append(prompt).generate(params_of(fields))

    def pin(fields: Fields) -> None:
        own = taken(fields, "ttl_s")
        llm.unpin_prefix(llm.pin_prefix(prompt_of(fields), **own).id)

    def beam_search(fields: Fields) -> None:
        prompt, made = prompt_of(fields), SHORT | fields
        if isinstance(made.get("structured_outputs"), dict):
            made["structured_outputs"] = StructuredOutputsParams(**made["structured_outputs"])
        llm.beam_search([prompt], BeamSearchParams(beam_width=2, **made))

    of_beams = ("max_tokens", "structured_outputs")
    not_beams = {
        name: "a search has the fields of BeamSearchParams, and always several beams"
        for name in OUTPUTS.split()
        if name not in of_beams
    }
    no_beams = {
        "best_of use_beam_search beam_width length_penalty early_stopping": "the best output is"
        " known at the end; refused whatever else is set",
    }
    no_text = {"prompt_token_ids cache_salt": "a conversation is text"}
    no_output = {OUTPUTS: "a prefix has no output"}
    return [
        door("LLM.generate", generate, PINS, LOCAL, NO_KEEP),
        door("LLM.chat", chat, PINS, LOCAL, NO_KEEP, NO_PRIORITY, no_text, fits=EMPTY_TEXT),
        door("LLM.beam_search", beam_search, PINS, LOCAL, NO_PRIORITY, not_beams),
        door("LLM.stream", stream, PINS, LOCAL, NO_KEEP, NO_PRIORITY, no_beams),
        door("LLM.session", session, PINS, LOCAL, NO_PRIORITY, ONE_OUTPUT),
        door("LLM.pin_prefix", pin, LOCAL, SERVER, NO_PRIORITY, no_output),
    ]


class LocalAsyncLLM(AsyncLLM):
    """An AsyncLLM over an engine in this process."""

    def __init__(self, llm: LLM, client: FakeClient) -> None:
        engine = llm.engine
        self._config = engine.config
        self._cores: Any = SimpleNamespace(is_alive=True, is_stopped=False)
        self._loaded = TextSide(engine.renderer, engine.renderer.tokenizer, engine.requests)
        self._text_threads, self._media, self._fake = TextThreads(), llm._media, client

    async def _connected(self) -> Any:
        return self._fake


def async_doors(llm: LLM, client: FakeClient, runner: asyncio.Runner) -> list[Door]:
    """Return the calls of an `AsyncLLM` that generate."""
    made = LocalAsyncLLM(llm, client)
    own_names = ("priority", "timeout_s", "tenant", "data_parallel_rank")

    async def read(outputs: Any) -> None:
        async for _ in outputs:
            pass

    def generate(fields: Fields) -> None:
        prompt, own = prompt_of(fields), taken(fields, *own_names)
        runner.run(read(made.generate(prompt, params_of(fields), **own)))

    def pieces(fields: Fields) -> None:
        prompt, own = prompt_of(fields), taken(fields, *own_names)

        async def one() -> Any:
            yield prompt

        runner.run(read(made.generate(one(), params_of(fields), **own)))

    async def run_session(prompt: Any, params: SamplingParams, own: Fields) -> None:
        async with made.session(**own) as begun:
            await begun.append(prompt)
            await read(begun.generate(params))

    def session(fields: Fields) -> None:
        own = taken(fields, "keep_s", "cache_salt")
        prompt = prompt_of(fields)
        runner.run(run_session(prompt, params_of(fields), own))

    async def run_pin(prompt: Any, own: Fields) -> None:
        await made.unpin_prefix((await made.pin_prefix(prompt, **own)).id)

    def pin(fields: Fields) -> None:
        own = taken(fields, "ttl_s", "tenant") | {"share": fields.pop("pin_share", 1.0)}
        runner.run(run_pin(prompt_of(fields), own))

    of_session = {"priority timeout_s tenant data_parallel_rank": "a session asks for none of it"}
    no_output = {
        OUTPUTS: "a prefix has no output",
        "priority timeout_s data_parallel_rank": "a prefix is pinned on every core, at once",
    }
    return [
        door("AsyncLLM.generate", generate, PINS, AN_ASYNC, NO_KEEP),
        door("AsyncLLM.pieces", pieces, PINS, AN_ASYNC, NO_KEEP, OPEN),
        door("AsyncLLM.session", session, PINS, AN_ASYNC, ONE_OUTPUT, of_session),
        door("AsyncLLM.pin_prefix", pin, AN_ASYNC, no_output),
    ]


def llm_pooling_doors(llm: LLM, client: FakeClient, runner: asyncio.Runner) -> list[Door]:
    """Return the calls of `LLM` and `AsyncLLM` to a model that embeds."""
    made = LocalAsyncLLM(llm, client)

    def embed(fields: Fields) -> None:
        llm.embed([prompt_of(fields)], PoolingParams(**fields), use_tqdm=False)

    def encode(fields: Fields) -> None:
        llm.encode([prompt_of(fields)], PoolingParams(**fields), use_tqdm=False)

    def score(fields: Fields) -> None:
        llm.score("fox", [prompt_of(fields)], PoolingParams(**fields), use_tqdm=False)

    async def run_encode(prompt: Any, params: PoolingParams, own: Fields) -> None:
        async for _ in made.encode(prompt, params, **own):
            pass

    def encode_async(fields: Fields) -> None:
        prompt, own = prompt_of(fields), taken(fields, "priority", "timeout_s", "tenant")
        runner.run(run_encode(prompt, PoolingParams(**fields), own))

    no_words = (POOLED, LOCAL, NO_PRIORITY)
    return [
        door("LLM.embed", embed, *no_words),
        door("LLM.encode", encode, *no_words),
        door("LLM.score", score, *no_words),
        door("AsyncLLM.encode", encode_async, POOLED, AN_ASYNC),
    ]
