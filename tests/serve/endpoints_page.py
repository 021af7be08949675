"""`python -m tests.serve.endpoints_page`: writes docs/use/endpoint-table.md.

The page shows the routes that the documents of each API list. The server's app says which of them
it has, and the table of fields how many fields each body has.
"""

import asyncio
import functools
import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fastapi import FastAPI
from fastapi.routing import APIRoute, APIWebSocketRoute
from pydantic import BaseModel
from starlette.routing import Match

from quire.base.settings.config import ServerConfig
from quire.serve.app import create_app
from quire.serve.bodies.open_body import body_class
from quire.serve.context import ApiContext
from quire.serve.errors import ApiError
from quire.serve.fields import IGNORED, REFUSED, TAKEN, bodies, is_of_other_engine, rows

PAGE = Path(__file__).parents[2] / "docs" / "use" / "endpoint-table.md"
NOT_STORED = "answers of chats are not stored; use /v1/responses"
NO_LORA = "use /v1/load_lora_adapter, and the adapter's name as model"
NO_PROFILER = "use `--record` and `quire trace`"
NO_MODELS = "models are files; use `quire list` and `quire rm`"
LOADED = "loaded at the first request; see several models"
# For each API lines `METHOD path`, with ` | ` and the alternative for a route that quire lacks, or
# with ` ! ` and the reason where quire has the path for another API, whose body differs.
ROUTES = {
    "OpenAI": f"""
        POST /v1/chat/completions
        GET /v1/chat/completions | {NOT_STORED}
        GET /v1/chat/completions/ID | {NOT_STORED}
        POST /v1/completions
        POST /v1/responses
        GET /v1/responses/ID
        DELETE /v1/responses/ID
        POST /v1/responses/ID/cancel
        GET /v1/responses/ID/input_items
        POST /v1/responses/input_tokens | use /tokenize
        POST /v1/responses/compact | send fewer messages
        POST /v1/embeddings
        GET /v1/models
        GET /v1/models/NAME
        DELETE /v1/models/NAME | {NO_MODELS}
        POST /v1/files
        GET /v1/files
        GET /v1/files/ID
        DELETE /v1/files/ID
        GET /v1/files/ID/content
        POST /v1/batches
        GET /v1/batches
        GET /v1/batches/ID
        POST /v1/batches/ID/cancel
        POST /v1/audio/speech
        POST /v1/audio/transcriptions
        POST /v1/audio/translations
        POST /v1/images/generations
        POST /v1/images/edits
        POST /v1/videos
        POST /v1/moderations
        POST /v1/fine_tuning/jobs
        POST /v1/assistants
        POST /v1/threads
        POST /v1/conversations
        POST /v1/vector_stores
        POST /v1/containers
        POST /v1/evals
        POST /v1/uploads
        POST /v1/realtime/client_secrets
    """,
    "Anthropic": """
        POST /v1/messages
        POST /v1/messages/count_tokens
        POST /v1/messages/batches
        GET /v1/messages/batches/ID
        GET /v1/models
        GET /v1/models/NAME
        POST /v1/complete | use /v1/messages
    """,
    "vLLM": f"""
        POST /v1/chat/completions
        POST /v1/chat/completions/batch | send a request for each conversation
        POST /v1/completions
        POST /v1/responses
        POST /v1/messages
        POST /v1/embeddings
        POST /pooling
        POST /classify
        POST /score
        POST /v1/score
        POST /rerank
        POST /v1/rerank
        POST /v2/rerank
        POST /v2/embed | use /v1/embeddings
        POST /tokenize
        POST /detokenize
        GET /tokenizer_info
        GET /health
        GET /ping
        GET /load
        GET /version
        GET /metrics
        POST /reset_prefix_cache
        POST /abort_requests
        POST /pause
        POST /resume
        GET /is_paused
        POST /sleep
        POST /wake_up
        GET /is_sleeping
        POST /v1/load_lora_adapter
        POST /v1/unload_lora_adapter
        POST /start_profile | {NO_PROFILER}
        POST /stop_profile | {NO_PROFILER}
        POST /collective_rpc | quire's processes take no calls of clients
        POST /init_weight_transfer_engine
        POST /start_weight_update
        POST /update_weights
        POST /finish_weight_update
        GET /get_world_size
        GET /server_info
        POST /inference/v1/generate
        POST /invocations
        POST /v1/audio/transcriptions
    """,
    "TRL": """
        GET /health/
        GET /get_world_size/
        POST /generate/
        POST /chat/
        POST /get_sequence_logprobs/
        POST /init_communicator/
        POST /update_named_param/
        POST /batch_update_named_params/
        POST /reset_prefix_cache/
        POST /close_communicator/
    """,
    "Ollama": """
        POST /api/chat
        POST /api/generate
        POST /api/embed
        POST /api/embeddings
        GET /api/tags
        POST /api/show
        GET /api/ps
        GET /api/version
        POST /api/pull
        POST /api/push
        POST /api/create
        POST /api/copy
        DELETE /api/delete
        POST /api/blobs/DIGEST | give the file as the model
    """,
    "llama.cpp": f"""
        POST /completion
        POST /infill
        POST /tokenize
        POST /detokenize
        POST /apply-template
        POST /embedding
        POST /reranking
        POST /rerank
        GET /props
        POST /props
        GET /slots
        POST /slots/ID
        GET /lora-adapters
        POST /lora-adapters
        GET /models
        POST /models/load | {LOADED}
        POST /models/unload | {LOADED}
        GET /health
        GET /metrics
    """,
    "SGLang": f"""
        POST /generate
        POST /encode | use /v1/embeddings
        POST /classify
        GET /model_info
        GET /get_model_info
        GET /server_info
        GET /get_server_info
        POST /flush_cache
        GET /health
        GET /health_generate
        GET /metrics
        POST /v1/rerank
        POST /abort_request | use /abort_requests
        POST /open_session | use sessions (/v1/requests)
        POST /close_session | use sessions (/v1/requests)
        POST /parse_function_call | answers of chats are parsed already
        POST /separate_reasoning | answers of chats are parsed already
        POST /load_lora_adapter | {NO_LORA}
        POST /update_weights_from_disk | use /update_weights
        POST /start_profile | {NO_PROFILER}
    """,
    "LM Studio": """
        GET /api/v0/models
        GET /api/v0/models/NAME
        POST /api/v0/chat/completions
        POST /api/v0/completions
        POST /api/v0/embeddings
        POST /api/v1/chat
        GET /api/v1/models
        POST /api/v1/models/load
        POST /api/v1/models/unload
        POST /api/v1/models/download
    """,
    "text-generation-inference": """
        POST / | use /v1/completions
        POST /generate ! it is SGLang's, where `inputs` gets 400; use /v1/completions
        POST /generate_stream
        POST /chat_tokenize
        POST /tokenize ! it is vLLM's, where `inputs` gets 400; send `prompt`
        GET /info
        GET /health
        GET /metrics
        GET /v1/models
        POST /v1/chat/completions
        POST /v1/completions
        POST /invocations
    """,
}
FATES = (TAKEN, IGNORED, REFUSED)
HEAD = """\
# Endpoints by API

<!-- written by `make fields` from the server's routes and bodies; do not edit -->

This page shows which endpoints of other servers quire has. [Endpoints](endpoints.md) explains those
that exist. The numbers count the fields of a body that are taken, ignored and refused;
[fields](fields.md) and [fields of other engines' endpoints](fields-native.md) list them. A refused
endpoint answers 501 with the reason, or 400 where another API has its path. An absent one answers
404, or 405 if its path exists with another method.
"""


@dataclass(frozen=True)
class Documented:
    """A route of an API. instead: the alternative if quire lacks the route, else empty. other: why
    quire rejects a body of this API, else empty."""

    method: str
    path: str
    instead: str
    other: str = ""


def documented(api: str) -> Iterator[Documented]:
    """Yield the routes of an API."""
    for line in ROUTES[api].strip().splitlines():
        rest, _, other = line.strip().partition(" ! ")
        route, _, instead = rest.partition(" | ")
        method, _, path = route.partition(" ")
        yield Documented(method, path, instead, other)


@functools.cache
def make_app() -> FastAPI:
    """Return an app that has its routes and cannot answer."""
    nothing = cast(Any, None)
    config = ServerConfig(files_dir="unused")
    return create_app(ApiContext(nothing, nothing, nothing, ("demo",), config, 0))


def route_of(app: FastAPI, each: Documented) -> APIRoute | None:
    """Return the app's own route for a documented one."""
    scope = {"type": "http", "method": each.method, "path": each.path, "headers": []}
    return next((r for r in table(app.routes) if r.matches(scope)[0] is Match.FULL), None)


def table(routes: Iterable[Any]) -> Iterator[APIRoute]:
    """Yield every HTTP route of an app, also of included routers."""
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        elif not isinstance(route, APIWebSocketRoute):
            yield from table(route.original_router.routes)


def refusal(app: FastAPI, each: Documented) -> str:
    """Return why the server answers 501 for a route; empty if it does not."""
    route = route_of(app, each)
    if route is None or route.include_in_schema or inspect.signature(route.endpoint).parameters:
        return ""
    try:
        asyncio.run(route.endpoint())
    except ApiError as error:
        return error.message.partition("is not supported: ")[2] or error.message
    return ""


@functools.cache
def fields() -> dict[type[BaseModel], str]:
    """Return the numbers of fields of each body, with a link to them."""
    found = {}
    fates = Counter((row.api, row.fate) for row in rows())
    for name, kind in bodies().items():
        page = "fields-native.md" if is_of_other_engine(name) else "fields.md"
        found[kind] = f"[{', '.join(str(fates[name, fate]) for fate in FATES)}]({page})"
    return found


def counts_of(route: APIRoute) -> str:
    """Return the numbers of fields of a route's body; empty for a route without a body."""
    kind = body_class(route.endpoint)
    return "" if kind is None else fields().get(kind, "")


def cells_of(app: FastAPI, each: Documented) -> tuple[str, str]:
    """Return how the server handles a route, and the numbers of its fields."""
    if reason := refusal(app, each):
        return f"refused: {reason.rstrip('.')}", ""
    if each.other:
        return f"refused: {each.other}", ""
    route = route_of(app, each)
    if route is None:
        return f"absent: {each.instead}", ""
    return "served", counts_of(route)


def page() -> str:
    """Return the page."""
    app, parts = make_app(), [HEAD]
    for api in ROUTES:
        lines = [f"## {api}", "", "| endpoint | here | fields |", "|---|---|---|"]
        for each in documented(api):
            here, fields = cells_of(app, each)
            lines.append(f"| `{each.method} {each.path}` | {here} | {fields} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def main() -> int:
    """Write the page; return the exit status."""
    PAGE.write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
