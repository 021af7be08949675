"""What every handler of one API process shares: the way to the core, and the text side."""

import copy
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import fastapi

from quire.base.settings.config import ServerConfig
from quire.engine.client.requests import RequestMaker
from quire.render.renderer import Renderer
from quire.serve.async_renderer import AsyncRenderer, Lanes
from quire.serve.bodies.reading import MODEL
from quire.serve.media.request_images import ImageReader
from quire.serve.observers.rate_limits import RateLimits
from quire.serve.peers import Peers
from quire.serve.responses.store import Responses
from quire.serve.several.all_models import AllModels

if TYPE_CHECKING:
    from quire.engine.client.async_client import AsyncClient
    from quire.serve.hooks.hooks import Hooks


@dataclass
class Activity:
    """Of an API process, whatever the model. num_open: HTTP requests that generate."""

    draining: bool = False
    num_open: int = 0


@dataclass
class ApiContext:
    """model_names: what requests may call the model; the first one is shown. started_s: unix time.

    draining: set when the process is asked to end: new work is refused, open work goes on.
    num_open: HTTP requests that generate and are being answered; the drain ends when it is 0.
    lanes: threads for long texts. hooks: what requests and answers pass through, if anything.
    rates: what keys may have in a minute, if that is limited.
    peers: the server's other API processes. responses: what this one keeps of /v1/responses.
    models: where there are several, the contexts of all of them, which share all that is no model's
    own; all_models: what is asked of all; be_known: waits until what the model takes is known.
    images: reads the images of requests.
    """

    client: "AsyncClient"
    renderer: Renderer
    requests: RequestMaker
    model_names: tuple[str, ...]
    config: ServerConfig
    started_s: int
    lanes: Lanes = field(default_factory=Lanes)
    hooks: "Hooks | None" = None
    rates: RateLimits | None = None
    peers: Peers = field(default_factory=Peers)
    activity: Activity = field(default_factory=Activity)
    models: "tuple[ApiContext, ...]" = ()
    all_models: AllModels | None = None
    be_known: Callable[[], Awaitable[None]] | None = None
    responses: Responses = field(init=False)
    images: ImageReader = field(init=False)

    def __post_init__(self) -> None:
        self.responses = Responses(self.config.response_store_bytes, self.peers.number)
        self.images = ImageReader(self.config)

    @property
    def takes_images(self) -> bool:
        """Whether the model has a vision tower."""
        return self.renderer.media is not None

    @property
    def takes_images_at_all(self) -> bool:
        """Whether one of the models has a vision tower."""
        return any(each.takes_images for each in self.models or (self,))

    @property
    def draining(self) -> bool:
        return self.activity.draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self.activity.draining = value

    @property
    def num_open(self) -> int:
        return self.activity.num_open

    @num_open.setter
    def num_open(self, value: int) -> None:
        self.activity.num_open = value

    @property
    def engine(self) -> "AsyncClient | AllModels":
        """What is asked of the whole server: of its one model, or of all."""
        return self.client if self.all_models is None else self.all_models

    @property
    def all_names(self) -> tuple[str, ...]:
        """What requests may call the models."""
        return tuple(name for each in self.models or (self,) for name in each.model_names)

    def of_model(self, name: object) -> "ApiContext":
        """Return the context of the model of that name; the first one if there is none."""
        found = (each for each in self.models if name in each.model_names)
        return next(found, self)

    async def of_request(self, request_id: str, tenant: str | None) -> "ApiContext":
        """Return the context of the model that a request runs or is held on; of several models, if
        none has it, this one."""
        for each in self.models:
            if await each.client.held(request_id, -1, tenant):
                return each
        return self

    def beside(
        self,
        client: "AsyncClient",
        renderer: Renderer,
        requests: RequestMaker,
        model_names: tuple[str, ...],
    ) -> "ApiContext":
        """Return a context of another model, which shares the rest with this one."""
        other = copy.copy(self)
        other.client, other.renderer, other.requests = client, renderer, requests
        other.model_names = model_names
        return other

    @property
    def async_renderer(self) -> AsyncRenderer:
        return AsyncRenderer(self.renderer, self.lanes)


async def context(request: fastapi.Request) -> ApiContext:
    """Return the context that answers this request: of the model that its body names, if there are
    several. Async, so that no thread is needed."""
    found: ApiContext = request.app.state.context
    return found.of_model(request.scope.get(MODEL)) if found.models else found


async def model_known(api: ApiContext, name: Any) -> None:
    """Wait until it is known what the model takes that a body names, or does not name. An unknown
    name is refused later. Raise EngineDead or EngineBusy."""
    if api.be_known is not None and (not name or name in api.model_names):
        await api.be_known()


# For handlers: `async def show(api: Api) -> ...`
Api = Annotated[ApiContext, fastapi.Depends(context)]


async def knowing(request: fastapi.Request, api: Api) -> None:
    """Dependency of routes that need to know what the model takes, and generate nothing."""
    await model_known(api, request.scope.get(MODEL))
