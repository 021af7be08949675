"""The server's OpenAPI document: FastAPI's document, corrected for our errors and responses.

FastAPI finds routes and bodies. Its errors do not apply here (422 is never sent), and it does not
know most responses, because their handlers return bytes. We derive the errors of an operation from
its parameters and body, so new routes have them, too. The responses are listed in ANSWERS.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from quire.serve.anthropic import errors as messages
from quire.serve.bodies.open_body import OpenBody
from quire.serve.context import DEFAULT_MODEL, ApiContext
from quire.serve.ollama import errors as ollama
from quire.serve.openai.scores import NAMES

Json = dict[str, Any]

PUBLIC = ("/health", "/health/", "/ready", "/ping")
NOT_SENT = "422"
ERROR = {"$ref": "#/components/schemas/Error"}
MESSAGE_ERROR = {"$ref": "#/components/schemas/MessageError"}
OLLAMA_ERROR = {"$ref": "#/components/schemas/OllamaError"}

ALWAYS = {
    "500": "an error inside the server",
    "503": "the engine has stopped, is busy or is shutting down",
}
WITH_KEY = {"401": "no valid API key"}
WITH_NAME = {"404": "no object has this id or name"}
OF_FILES = {
    "400": "the form, the body or a field is invalid; `param` names it",
    "404": "no such file or batch, or files are disabled (--files-dir)",
    "409": "a batch still needs this file, or the batch is done already",
    "413": "the storage limit is reached",
    "429": "too many batches are waiting",
}
BY_OPERATORS = {
    "400": "the order is invalid, or impossible now",
    "403": "only an admin key may give this order, or it names a path of its own",
}
ORDERS = (
    "/reset_prefix_cache", "/reset_prefix_cache/", "/abort_requests", "/pause", "/resume",
    "/is_paused", "/sleep", "/wake_up", "/is_sleeping",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/lora-adapters",
    "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
    "/update_weights/chunk", "/finish_weight_update",
)  # fmt: skip
WITH_QUERY = {
    "400": "the query is invalid, or does not fit the requested object; `param` names the parameter"
}
WITH_BODY = {
    "400": "the body or one of its fields is invalid; `param` names it",
    "404": "no such model",
    "408": "the body did not arrive in time, or `timeout_s` has passed",
    "413": "the body is too large, or has too many values",
    "429": "a rate limit of this key is reached; Retry-After says how long to wait",
    "415": "the Content-Type is not JSON, or the Content-Encoding is not supported",
}


def document(app: FastAPI) -> Json:
    """Return the OpenAPI document of an app's routes. It is built once."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = found.setdefault("components", {}).setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        context: ApiContext = app.state.context
        for schema in schemas.values():
            if "model" in schema.get("properties", {}):
                schema["properties"]["model"] = {"enum": [*context.all_names, DEFAULT_MODEL, None]}
        for name in ("CompletionRequest", "StudioCompletionBody"):
            schemas[name]["required"] = ["prompt"]
        schemas["ResponsesRequest"]["required"] = ["input"]
        for name in ("EmbeddingBody", "ClassifyBody", "StudioEmbeddingBody"):
            schemas[name]["required"] = ["input"]
        schemas["ScoreBody"]["anyOf"] = [{"required": list(names)} for names in NAMES]
        if not context.config.strict_fields:
            for name in _open_bodies() & schemas.keys():
                schemas[name]["additionalProperties"] = True
        for name in ("PrefixBody", "TokenizeBody"):
            schemas[name]["oneOf"] = [{"required": ["prompt"]}, {"required": ["messages"]}]
        schemas["TokenizeBody"]["oneOf"].append({"required": ["content"]})
        schemas["TextsBody"]["oneOf"] = [{"required": ["text"]}, {"required": ["input_ids"]}]
        schemas["Error"], schemas["MessageError"] = ERROR_SCHEMA, MESSAGE_ERROR_SCHEMA
        schemas["OllamaError"] = _object(error="string")
        needs_key = bool(context.config.api_key)
        if needs_key:
            found["components"]["securitySchemes"] = {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
        for path, operations in found["paths"].items():
            for method, operation in operations.items():
                _describe(method, path, operation, needs_key and path not in PUBLIC)
        app.openapi_schema = found
    return app.openapi_schema


def _open_bodies() -> set[str]:
    """Return the names of the bodies whose unknown fields are removed."""
    kinds = OpenBody.__subclasses__()
    for kind in kinds:  # the loop also visits the subclasses that it appends
        kinds += kind.__subclasses__()
    return {kind.__name__ for kind in kinds}


def _describe(method: str, path: str, operation: Json, needs_key: bool) -> None:
    """Add the responses and errors of an operation to its description, in place."""
    errors = dict(ALWAYS)
    if needs_key:
        errors |= WITH_KEY
        operation["security"] = [{"key": []}, {"x-api-key": []}]
    if operation.get("parameters"):
        errors |= WITH_NAME
        if any(parameter["in"] == "query" for parameter in operation["parameters"]):
            errors |= WITH_QUERY
    if "requestBody" in operation:
        errors |= WITH_BODY
    if path.startswith("/v1/requests/") and method == "post":
        errors |= {"409": "the request is still running"}
    if path.startswith(("/v1/files", "/v1/batches")):
        errors |= OF_FILES
    if path in ORDERS:
        errors |= BY_OPERATORS | errors
    if path.endswith("/chunk"):
        errors |= {"507": "there is no room for the chunk"}
    responses = operation["responses"]
    responses.pop(NOT_SENT, None)
    if path in PUBLIC:
        responses["200"] = {"description": "yes"}
        responses["503"] = {"description": "no"}
        if operation.get("parameters"):  # `model`, which may be unknown, or may need a key
            named = WITH_NAME | (WITH_KEY if needs_key else {})
            _add_errors(responses, named | WITH_QUERY, ERROR)
        return
    found = ANSWERS.get((method, path))
    if found is not None:
        responses["200"] = {"description": "the answer", "content": found}
    error = MESSAGE_ERROR if path.startswith(messages.PATH) else ERROR
    if ollama.is_ollama({"path": path}):
        error = OLLAMA_ERROR
    _add_errors(responses, errors, error)


def _add_errors(responses: Json, errors: Mapping[str, str], schema: Json) -> None:
    """Describe the responses with these statuses as errors of this schema."""
    for status, description in sorted(errors.items()):
        content = {"application/json": {"schema": schema}}
        responses[status] = {"description": description, "content": content}


# ---- responses -------------------------------------------------------------------------------


def _object(optional: Json | None = None, /, **fields: Any) -> Json:
    """Return the schema of an object with these required fields. It may have others, of which
    `optional` describes some."""
    properties = {name: _schema(kind) for name, kind in (fields | (optional or {})).items()}
    return {"type": "object", "properties": properties, "required": list(fields)}


def _schema(kind: Any) -> Json:
    """Return a schema. kind: the name of a type, [kind] for a list, allowed values joined by
    " or ", or a schema."""
    if isinstance(kind, list):
        return {"type": "array", "items": _schema(kind[0])}
    if isinstance(kind, dict):
        return kind
    names = kind.split(" or ")
    if set(names) <= {"string", "integer", "number", "object", "null", "array", "boolean"}:
        return {"type": names[0]} if len(names) == 1 else {"anyOf": [{"type": n} for n in names]}
    return {"type": "string", "enum": names}


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


_USAGE = _object(
    prompt_tokens="integer", completion_tokens="integer", total_tokens="integer",
    prompt_tokens_details=_object(cached_tokens="integer"),
)  # fmt: skip
_MESSAGE = _object(role="assistant", content="string or null", refusal="string or null")
_CHOICE = _object(
    {"weights_versions": [_object(first_token="integer", version="string")]},
    index="integer", logprobs="object or null", finish_reason="string",
    stop_reason="string or integer or null",
)  # fmt: skip
_TEXT_CHOICE = {"allOf": [_CHOICE, _object(text="string")]}
_CHAT_CHOICE = {"allOf": [_CHOICE, _object(message=_MESSAGE)]}
_HEAD = {"id": "string", "created": "integer", "model": "string"}
_MODEL = _object(
    id="string", object="model", created="integer", owned_by="string", root="string",
    max_model_len="integer", default_sampling_params="object",
)  # fmt: skip
_MODELS = _object(object="list", data=[_MODEL])
_PREFIX = _object(
    id="string", object="prefix", status="ready or computing", num_tokens="integer",
    num_blocks="integer", num_hits="integer", age_s="number", expires_in_s="number or null",
)  # fmt: skip
_TOKENS = _object(
    id="string", object="request.tokens", index="integer", status="live or held",
    num_prompt_tokens="integer", num_tokens="integer", num_blocks="integer",
    expires_in_s="number or null",
)  # fmt: skip
_FILE = _object(
    id="string", object="file", bytes="integer", created_at="integer",
    expires_at="integer or null", filename="string", purpose="string", status="processed",
)  # fmt: skip
_BATCH = _object(
    id="string", object="batch", endpoint="string", errors="object or null",
    input_file_id="string", completion_window="string", status="string",
    output_file_id="string or null", error_file_id="string or null", created_at="integer",
    request_counts=_object(total="integer", completed="integer", failed="integer"),
    metadata="object or null",
)  # fmt: skip
_RESPONSE = _object(
    id="string", object="response", created_at="integer", model="string", output=["object"],
    status="completed or failed or in_progress or cancelled or queued or incomplete",
    usage="object or null",
)  # fmt: skip
# No type: some tools take a schema here for the text, and others for each event.
_EVENTS = {
    "text/event-stream": {"schema": {"description": "server-sent events, with JSON as their data"}}
}

_LIST = {"object": "list", **_HEAD, "usage": _USAGE}
_SCORES = _object(**_LIST, data=[_object(index="integer", object="score", score="number")])
_RANKS = _object(
    id="string", model="string", usage=_USAGE,
    results=[_object(index="integer", relevance_score="number")],
)  # fmt: skip
_EMBEDDING = _object(index="integer", object="embedding", embedding="array or string")
_CLASSES = _object(index="integer", label="string", probs=["number"], num_classes="integer")

ERROR_SCHEMA = _object(
    error=_object(
        message="string", type="string", param="string or null", code="string or integer or null"
    )
)
MESSAGE_ERROR_SCHEMA = _object(
    type="error", error=_object(type="string", message="string"), request_id="string or null"
)
_MESSAGE_USAGE = _object(
    input_tokens="integer", cache_creation_input_tokens="integer",
    cache_read_input_tokens="integer", output_tokens="integer",
)  # fmt: skip
_ANTHROPIC_MESSAGE = _object(
    id="string", type="message", role="assistant", model="string",
    content=[_object(type="text or thinking or tool_use")], stop_reason="string",
    stop_sequence="string or null", usage=_MESSAGE_USAGE,
)  # fmt: skip
_RERANKS = ("/rerank", "/reranking", "/v1/rerank", "/v2/rerank")
_LINES = {"application/x-ndjson": {"schema": {"description": "lines of JSON"}}}
_OLLAMA_END = {
    "model": "string",
    "created_at": "string",
    "done": "boolean",
    "done_reason": "string",
}
_OLLAMA_MODELS = _object(models=[_object(
    name="string", model="string", size="integer", digest="string", details="object",
)])  # fmt: skip
_REFUSED = ("/api/create", "/api/copy", "/api/push", "/props", "/slots/{slot_id}")
# The answers to a `prompt` or `messages`, and to `content`.
_VLLM_TOKENS = _object(
    tokens=["integer"], count="integer", max_model_len="integer", token_strs="array or null"
)
_LLAMACPP_TOKENS = _object(
    tokens=[{"anyOf": [{"type": "integer"}, _object(id="integer", piece="string or array")]}]
)
_STUDIO_MODEL = _object(
    id="string", object="model", type="llm or vlm or embeddings", arch="string",
    state="loaded or not-loaded", max_context_length="integer or null",
)  # fmt: skip
_STUDIO = {"stats": "object", "model_info": "object", "runtime": "object"}
# SGLang's
_GENERATED = _object(
    text="string", output_ids=["integer"],
    meta_info=_object(
        id="string", prompt_tokens="integer", completion_tokens="integer", cached_tokens="integer",
        finish_reason=_object(type="stop or length or abort"),
    ),
)  # fmt: skip
_MODEL_INFO = _object(model_path="string", is_generation="boolean", model_type="string")
_SERVER_INFO = _object(
    served_model_name="string", context_length="integer", max_running_requests="integer",
    version="string", status="string", internal_states=["object"],
)  # fmt: skip
# TRL's
_ROLLOUTS = _object(
    prompt_ids=[["integer"]], completion_ids=[["integer"]],
    logprobs={"anyOf": [_schema([[["number"]]]), {"type": "null"}]},
    logprob_token_ids={"anyOf": [_schema([[["integer"]]]), {"type": "null"}]},
)  # fmt: skip
_COMPLETION = {"type": "object", "properties": {"content": {"type": "string"}}}
OF_OTHER_ENGINES: dict[tuple[str, str], Json] = {
    ("post", "/api/chat"): _LINES | _json(_object(**_OLLAMA_END, message="object")),
    ("post", "/api/generate"): _LINES | _json(_object(**_OLLAMA_END, response="string")),
    ("post", "/api/embed"): _json(_object(model="string", embeddings=[["number"]])),
    ("post", "/api/embeddings"): _json(_object(embedding=["number"])),
    ("get", "/api/version"): _json(_object(version="string", quire="string")),
    ("get", "/api/tags"): _json(_OLLAMA_MODELS),
    ("get", "/api/ps"): _json(_OLLAMA_MODELS),
    ("post", "/api/show"): _json(_object(
        parameters="string", template="string", details="object", model_info="object",
        capabilities=["string"],
    )),
    ("post", "/api/pull"): _LINES | _json(_object(status="string")),
    ("delete", "/api/delete"): _json({"not": {}}),
    **{("post", path): _json({"not": {}}) for path in _REFUSED},  # always an error
    **{
        ("post", path): _EVENTS | _json(_COMPLETION)
        for path in ("/completion", "/completions", "/infill")
    },
    ("get", "/props"): _json(_object(
        default_generation_settings="object", total_slots="integer", chat_template="string",
    )),
    ("get", "/slots"): _json(_schema([_object(id="integer", is_processing="boolean")])),
    ("post", "/apply-template"): _json(_object(prompt="string")),
    ("get", "/api/v0/models"): _json(_object(object="list", data=[_STUDIO_MODEL])),
    ("get", "/api/v0/models/{name}"): _json(_STUDIO_MODEL),
    ("post", "/api/v0/chat/completions"): _EVENTS
    | _json(_object(object="chat.completion", choices=[_CHAT_CHOICE], usage=_USAGE, **_STUDIO)),
    ("post", "/api/v0/completions"): _EVENTS
    | _json(_object(object="text_completion", choices=[_TEXT_CHOICE], usage=_USAGE, **_STUDIO)),
    ("post", "/api/v0/embeddings"): _json(_object(**_LIST, data=[_EMBEDDING])),
    ("post", "/generate"): _EVENTS | _json({"anyOf": [_GENERATED, _schema([_GENERATED])]}),
    ("get", "/health_generate"): {},  # no body
    ("post", "/flush_cache"): {"text/plain": {"schema": {"type": "string"}}},
    **{("get", path): _json(_MODEL_INFO) for path in ("/model_info", "/get_model_info")},
    **{("get", path): _json(_SERVER_INFO) for path in ("/server_info", "/get_server_info")},
    **{("post", path): _json(_ROLLOUTS) for path in ("/generate/", "/chat/")},
    ("post", "/get_sequence_logprobs/"): _json({"type": "object"}),
    ("get", "/get_world_size/"): _json(_object(world_size="integer")),
    ("post", "/reset_prefix_cache/"): _json(_object(reset="boolean")),
    ("post", "/close_communicator/"): _json(_object(message="string")),
    ("post", "/embedding"): _json(_schema([_object(index="integer", embedding=[["number"]])])),
}  # fmt: skip
ANSWERS: dict[tuple[str, str], Json] = OF_OTHER_ENGINES | {
    ("post", "/v1/messages"): _EVENTS | _json(_ANTHROPIC_MESSAGE),
    ("post", "/v1/messages/count_tokens"): _json(_object(input_tokens="integer")),
    ("post", "/v1/completions"): _EVENTS
    | _json(_object(**_HEAD, object="text_completion", choices=[_TEXT_CHOICE], usage=_USAGE)),
    ("post", "/v1/chat/completions"): _EVENTS
    | _json(_object(**_HEAD, object="chat.completion", choices=[_CHAT_CHOICE], usage=_USAGE)),
    ("post", "/v1/responses"): _EVENTS | _json(_RESPONSE),
    ("get", "/v1/responses/{response_id}"): _EVENTS | _json(_RESPONSE),
    ("delete", "/v1/responses/{response_id}"): _json(
        _object(id="string", object="response", deleted="boolean")
    ),
    ("post", "/v1/responses/{response_id}/cancel"): _json(_RESPONSE),
    ("get", "/v1/responses/{response_id}/input_items"): _json(
        _object(
            object="list", data=["object"], first_id="string", last_id="string",
            has_more="boolean",
        )
    ),
    ("post", "/v1/embeddings"): _json(_object(**_LIST, data=[_EMBEDDING])),
    ("post", "/classify"): _json(_object(**_LIST, data=[_CLASSES])),
    **{("post", path): _json(_SCORES) for path in ("/score", "/v1/score")},
    **{("post", path): _json(_RANKS) for path in _RERANKS},
    **{("get", path): _json(_MODELS) for path in ("/models", "/v1/models")},
    ("get", "/v1/models/{name}"): _json({"anyOf": [_MODEL, _MODELS]}),
    ("post", "/v1/prefixes"): _json(_PREFIX),
    ("get", "/v1/prefixes"): _json(_object(object="list", data=[_PREFIX])),
    ("get", "/v1/prefixes/{prefix_id}"): _json(_PREFIX),
    ("delete", "/v1/prefixes/{prefix_id}"): _json(
        _object(id="string", object="prefix", deleted="boolean")
    ),
    ("post", "/v1/files"): _json(_FILE),
    ("get", "/v1/files"): _json(_object(object="list", data=[_FILE], has_more="boolean")),
    ("get", "/v1/files/{file_id}"): _json(_FILE),
    ("get", "/v1/files/{file_id}/content"): {"application/jsonl": {"schema": {"type": "string"}}},
    ("delete", "/v1/files/{file_id}"): _json(
        _object(id="string", object="file", deleted="boolean")
    ),
    ("post", "/v1/batches"): _json(_BATCH),
    ("get", "/v1/batches"): _json(_object(object="list", data=[_BATCH], has_more="boolean")),
    ("get", "/v1/batches/{batch_id}"): _json(_BATCH),
    ("post", "/v1/batches/{batch_id}/cancel"): _json(_BATCH),
    ("get", "/v1/requests/{request_id}"): _json(_object(object="request.timeline or list")),
    ("delete", "/v1/requests/{request_id}"): _json(
        _object(id="string", object="request", deleted="boolean")
    ),
    ("get", "/v1/requests"): _json(_object(object="list", data=[_TOKENS])),
    ("get", "/v1/requests/{request_id}/tokens"): _json(_TOKENS),
    ("post", "/v1/requests/{request_id}/rewind"): _json(_TOKENS),
    ("post", "/v1/requests/{request_id}/keep"): _json(_TOKENS),
    **{
        ("post", f"/v1/requests/{{request_id}}/{verb}"): _EVENTS
        | _json(_object(
            **_HEAD, object="text_completion", choices=[_TEXT_CHOICE], usage=_USAGE,
            forked_from=_object(id="string", index="integer", at_token="integer"),
        ))
        for verb in ("fork", "append")
    },
    ("get", "/v1/engine/live"): _EVENTS,
    ("post", "/tokenize"): _json({"anyOf": [_VLLM_TOKENS, _LLAMACPP_TOKENS]}),
    ("post", "/detokenize"): _json(_object(prompt="string", content="string")),
    ("get", "/tokenizer_info"): _json(
        _object(
            tokenizer_class="string", vocab_size="integer", model_max_length="integer",
            chat_template="string or null", eos_token="string or null",
        )
    ),
    ("post", "/inference/v1/generate"): _EVENTS
    | _json(_object(
        request_id="string", created="integer", model="string", usage=_USAGE,
        choices=[_object(
            {"routed_experts": "string"},
            index="integer", token_ids=["integer"], finish_reason="string",
            logprobs="object or null",
        )],
    )),
    ("get", "/get_world_size"): _json(_object(world_size="integer")),
    ("post", "/reset_prefix_cache"): _json(_object(reset="boolean")),
    ("post", "/pause"): _json(_object(status="string")),
    ("post", "/resume"): _json(_object(status="string")),
    ("get", "/is_paused"): _json(_object(is_paused="boolean")),
    ("post", "/sleep"): _json(_object(status="string")),
    ("post", "/wake_up"): _json(_object(status="string")),
    ("get", "/is_sleeping"): _json(_object(is_sleeping="boolean")),
    ("post", "/init_weight_transfer_engine"): _json(_object(message="string")),
    ("post", "/start_weight_update"): _json(_object(message="string")),
    ("post", "/update_weights/chunk"): _json(_object(chunks="integer")),
    **{
        ("post", path): _json(_object(message="string", weights_version="string"))
        for path in ("/update_weights", "/finish_weight_update")
    },
    ("post", "/abort_requests"): _json(_object(request_ids=["string"])),
    ("post", "/v1/load_lora_adapter"): {"text/plain": {"schema": {"type": "string"}}},
    ("post", "/v1/unload_lora_adapter"): {"text/plain": {"schema": {"type": "string"}}},
    ("get", "/lora-adapters"): _json(
        _schema([_object(id="integer", path="string", scale="number", name="string")])
    ),
    ("post", "/lora-adapters"): _json(_object(success="boolean")),
    ("get", "/load"): _json(_object(server_load="integer")),
    ("get", "/version"): _json(_object(version="string")),
    ("get", "/metrics"): {"text/plain": {"schema": {"type": "string"}}},
}  # fmt: skip
