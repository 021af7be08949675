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
from quire.serve.context import ApiContext
from quire.serve.openai.scores import NAMES

Json = dict[str, Any]

PUBLIC = ("/health", "/ready", "/ping")
NOT_SENT = "422"
ERROR = {"$ref": "#/components/schemas/Error"}
MESSAGE_ERROR = {"$ref": "#/components/schemas/MessageError"}

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
                schema["properties"]["model"] = {"enum": [*context.all_names, None]}
        schemas["CompletionRequest"]["required"] = ["prompt"]
        schemas["ResponsesRequest"]["required"] = ["input"]
        for name in ("EmbeddingBody", "ClassifyBody"):
            schemas[name]["required"] = ["input"]
        schemas["ScoreBody"]["anyOf"] = [{"required": list(names)} for names in NAMES]
        if not context.config.strict_fields:
            for name in _open_bodies() & schemas.keys():
                schemas[name]["additionalProperties"] = True
        for name in ("PrefixBody", "TokenizeBody"):
            schemas[name]["oneOf"] = [{"required": ["prompt"]}, {"required": ["messages"]}]
        schemas["Error"], schemas["MessageError"] = ERROR_SCHEMA, MESSAGE_ERROR_SCHEMA
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
    _add_errors(responses, errors, error)


def _add_errors(responses: Json, errors: Mapping[str, str], schema: Json) -> None:
    """Describe the responses with these statuses as errors of this schema."""
    for status, description in sorted(errors.items()):
        content = {"application/json": {"schema": schema}}
        responses[status] = {"description": description, "content": content}


# ---- responses -------------------------------------------------------------------------------


def _object(**fields: Any) -> Json:
    """Return the schema of an object with these required fields; it may have others."""
    properties = {name: _schema(kind) for name, kind in fields.items()}
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
ANSWERS: dict[tuple[str, str], Json] = {
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
    **{("post", path): _json(_RANKS) for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
    ("get", "/v1/models"): _json(_MODELS),
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
    ("post", "/tokenize"): _json(
        _object(
            count="integer", max_model_len="integer", tokens=["integer"],
            token_strs="array or null",
        )
    ),
    ("post", "/detokenize"): _json(_object(prompt="string")),
    ("get", "/tokenizer_info"): _json(
        _object(
            tokenizer_class="string", vocab_size="integer", model_max_length="integer",
            chat_template="string or null", eos_token="string or null",
        )
    ),
    ("post", "/reset_prefix_cache"): _json(_object(reset="boolean")),
    ("post", "/abort_requests"): _json(_object(request_ids=["string"])),
    ("get", "/load"): _json(_object(server_load="integer")),
    ("get", "/version"): _json(_object(version="string")),
    ("get", "/metrics"): {"text/plain": {"schema": {"type": "string"}}},
}  # fmt: skip
