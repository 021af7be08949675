"""The FastAPI app of an API process: its routes, their access control, and its middleware."""

import functools
import warnings

from fastapi import APIRouter, Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from pydantic.warnings import UnsupportedFieldAttributeWarning as FieldWarning
from starlette.routing import BaseRoute

from quire.base.version import QUIRE_VERSION
from quire.serve.anthropic import routes as messages
from quire.serve.anthropic.errors import REQUEST_ID
from quire.serve.batches import batches_routes, files_routes
from quire.serve.batches.batches import Batches
from quire.serve.bodies.open_body import IGNORED_HEADER
from quire.serve.context import ApiContext
from quire.serve.error_handlers import install_error_handlers
from quire.serve.http.auth import authorised
from quire.serve.http.limits import BodyLimit, generating
from quire.serve.http.middleware import REQUEST_ID_HEADER, HeadAsGet, RequestIds, TraceHeaders
from quire.serve.http.origins import HostCheck, OriginCheck, checks_hosts
from quire.serve.http.rate_gate import HEADERS, RateHeaders
from quire.serve.llamacpp import routes as llamacpp
from quire.serve.llamacpp import server as llamacpp_server
from quire.serve.lmstudio import routes as lmstudio
from quire.serve.native import (
    adapters,
    admin,
    live,
    page,
    prefixes,
    refused,
    sessions,
    stream,
    trainer,
    utility,
)
from quire.serve.ollama import models as ollama_models
from quire.serve.ollama import routes as ollama
from quire.serve.openai import chat_completions, completions, embeddings, scores
from quire.serve.responses import routes as responses
from quire.serve.rollouts import tokens, trl
from quire.serve.sglang import routes as sglang
from quire.serve.sglang import server as sglang_server


def create_app(context: ApiContext, batches: Batches | None = None) -> FastAPI:
    """Make the ASGI app that serves this context.

    Most routes need an API key. `utility.public`, the web page and the page of the docs do not.
    `stream` checks the key itself, because a dependency cannot refuse a WebSocket.
    batches: batches of a server that stores files; the caller starts and stops them.
    """
    app = FastAPI(
        title="quire", version=QUIRE_VERSION, docs_url=None, redoc_url=None,
        redirect_slashes=False,  # a redirect would use the client's Host header
        openapi_url=None,  # a route of our own serves it, to key holders
    )  # fmt: skip
    # FastAPI hides this warning while it makes a route, but each `StrictBody` is built later.
    warnings.filterwarnings("ignore", "The 'alias' attribute with value 'body'", FieldWarning)
    app.state.context, app.state.batches = context, batches
    app.router.routes += _routes(context.config.page, not context.config.disable_fastapi_docs)
    install_error_handlers(app)
    _add_middleware(app, context)
    return app


@functools.cache
def _routes(has_page: bool, has_docs: bool) -> tuple[BaseRoute, ...]:
    """Return the routes of apps. The apps of a process share them, because FastAPI takes longer to
    prepare all routes than to answer a request. It tries them in this order, so the routes whose
    clients wait for a first token come first."""
    router = APIRouter()
    protected = Depends(authorised)
    for each in (
        chat_completions.router, completions.router, embeddings.router, scores.router,
        ollama.router, llamacpp.router, sglang.router, tokens.router, trl.generating_router,
        messages.generating_router,
    ):  # fmt: skip
        router.include_router(each, dependencies=[protected, Depends(generating)])
    for each in (sglang_server.generating_router, lmstudio.generating_router):
        router.include_router(each, dependencies=[protected])
    router.include_router(utility.public)
    router.include_router(trl.public)
    router.include_router(utility.router, dependencies=[protected])
    if has_page:
        router.include_router(page.router)
    if has_docs:
        router.include_router(utility.page)
        router.include_router(utility.description, dependencies=[protected])
    for each in (
        responses.router, responses.stored_router, messages.counting_router,
        prefixes.router, sessions.router, admin.router, adapters.router, live.router,
        files_routes.router, batches_routes.router, ollama_models.router,
        llamacpp_server.router, refused.router, sglang_server.router,
        lmstudio.router, trainer.router, trainer.chunks, trl.router,
    ):  # fmt: skip
        router.include_router(each, dependencies=[protected])
    router.include_router(stream.router)
    router.include_router(refused.sockets)
    return tuple(router.routes)


def _add_middleware(app: FastAPI, context: ApiContext) -> None:
    """Add middleware; the last one added is the outermost."""
    app.add_middleware(BodyLimit, context=context)
    app.add_middleware(OriginCheck, config=context.config)
    if context.rates is not None:
        app.add_middleware(RateHeaders, rates=context.rates)
    if context.config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(context.config.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER.decode(), REQUEST_ID, IGNORED_HEADER, *HEADERS],
        )
    app.add_middleware(HeadAsGet)
    if context.config.otlp_traces_endpoint is not None:
        app.add_middleware(TraceHeaders)
    if checks_hosts(context.config):
        app.add_middleware(HostCheck, config=context.config)
    app.add_middleware(RequestIds)
