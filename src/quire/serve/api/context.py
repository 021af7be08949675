"""What every handler of one API process shares: the way to the core, and the text side."""

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import fastapi

from quire.base.config import ServerConfig
from quire.engine.requests import RequestMaker
from quire.render.renderer import Renderer
from quire.serve.api.peers import Peers
from quire.serve.api.responses.state import Responses
from quire.serve.async_renderer import AsyncRenderer
from quire.serve.lanes import Lanes
from quire.serve.rate_limits import RateLimits

if TYPE_CHECKING:
    from quire.engine.remote import AsyncClient
    from quire.serve.hooks import Hooks


@dataclass
class ApiContext:
    """model_names: what requests may call the model; the first one is shown. started_s: unix time.

    draining: set when the process is asked to end: new work is refused, open work goes on.
    num_open: HTTP requests that generate and are being answered; the drain ends when it is 0.
    lanes: threads for long texts. hooks: what requests and answers pass through, if anything.
    rates: what keys may have in a minute, if that is limited.
    peers: the server's other API processes. responses: what this one keeps of /v1/responses.
    """

    client: "AsyncClient"
    renderer: Renderer
    requests: RequestMaker
    model_names: tuple[str, ...]
    config: ServerConfig
    started_s: int
    draining: bool = False
    num_open: int = 0
    lanes: Lanes = field(default_factory=Lanes)
    hooks: "Hooks | None" = None
    rates: RateLimits | None = None
    peers: Peers = field(default_factory=Peers)
    responses: Responses = field(init=False)

    def __post_init__(self) -> None:
        self.responses = Responses(self.config.response_store_bytes, self.peers.number)

    @property
    def async_renderer(self) -> AsyncRenderer:
        return AsyncRenderer(self.renderer, self.lanes)


async def context(request: fastapi.Request) -> ApiContext:
    """Return the context of the app that answers this request. Async, so that no thread is
    needed."""
    found: ApiContext = request.app.state.context
    return found


# For handlers: `async def show(api: Api) -> ...`
Api = Annotated[ApiContext, fastapi.Depends(context)]


def new_id(prefix: str) -> str:
    """Return a unique id such as cmpl-3f2a...; ids are never taken from what a client sends."""
    return f"{prefix}-{uuid.uuid4().hex}"
