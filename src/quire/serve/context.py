"""The context of an API process: the engine client, the renderer, and all that handlers share."""

import copy
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import fastapi

from quire.base.settings.config import ServerConfig
from quire.engine.client.adapters import Adapter, AdapterIndex
from quire.engine.client.request_maker import RequestMaker
from quire.render.renderer import Renderer
from quire.serve.async_renderer import AsyncRenderer, TextThreads
from quire.serve.bodies.reading import MODEL
from quire.serve.media.request_images import ImageReader
from quire.serve.observers.rate_limits import RateLimits
from quire.serve.peers import Peers
from quire.serve.pipeline.retention import HintedRequests
from quire.serve.responses.store import Responses
from quire.serve.several.all_models import AllModels
from quire.serve.several.messages import LOADED
from quire.serve.uploads import Uploads

if TYPE_CHECKING:
    from quire.engine.client.async_client import AsyncClient
    from quire.serve.hooks.hooks import Hooks

DEFAULT_MODEL = "default"  # the first model, as clients of SGLang's server name it


@dataclass
class Activity:
    """State of an API process that all its models share. num_open: open generating requests."""

    draining: bool = False
    num_open: int = 0


@dataclass
class ApiContext:
    """Everything that a handler needs to answer a request to one model.

    model_names: names of the model in requests; responses show the first one. started_s: unix time.
    draining: set while the process shuts down: new work is refused, open work continues.
    num_open: open HTTP requests that generate; the drain ends when it is 0.
    text_threads: threads for long texts. hooks: filters of prompts and responses, if configured.
    rates: rate limits of the keys, if configured. peers: the server's other API processes.
    hinted: requests that clients' caching hints retain. uploads: chunks of new weights.
    responses: responses of /v1/responses that this process stores. images: reader of images.
    models: with several models, the contexts of all; they share everything but the model's own.
    all_models: with several models, the view of all of them. wait_until_known: waits until the
    model's limits and abilities are known.
    adapters: the contexts of the model's adapters by name, which all of them share. scales: the
    scale of each adapter in requests to the base model. base, adapter, adapter_number: of an
    adapter's context, the base model's context, the adapter, and its number in llama.cpp's API.
    """

    client: "AsyncClient"
    renderer: Renderer
    requests: RequestMaker
    model_names: tuple[str, ...]
    config: ServerConfig
    started_s: int
    text_threads: TextThreads = field(default_factory=TextThreads)
    hooks: "Hooks | None" = None
    rates: RateLimits | None = None
    peers: Peers = field(default_factory=Peers)
    activity: Activity = field(default_factory=Activity)
    models: "tuple[ApiContext, ...]" = ()
    all_models: AllModels | None = None
    wait_until_known: Callable[[], Awaitable[None]] | None = None
    adapters: "dict[str, ApiContext]" = field(default_factory=dict)
    adapter_index: AdapterIndex = field(default_factory=AdapterIndex)
    scales: dict[str, float] = field(default_factory=dict)
    base: "ApiContext | None" = None
    adapter: Adapter | None = None
    adapter_number: int = 0
    hinted: HintedRequests = field(default_factory=HintedRequests)
    uploads: Uploads = field(default_factory=Uploads)
    responses: Responses = field(init=False)
    images: ImageReader = field(init=False)

    def __post_init__(self) -> None:
        self.responses = Responses(self.config.response_store_bytes, self.peers.number)
        self.images = ImageReader(self.config)

    @property
    def takes_images(self) -> bool:
        """Whether this model has a vision tower."""
        return self.renderer.media is not None

    @property
    def takes_images_at_all(self) -> bool:
        """Whether any of the models has a vision tower."""
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
        """Interface to the whole server: the client of the only model, or all models."""
        return self.client if self.all_models is None else self.all_models

    @property
    def all_names(self) -> tuple[str, ...]:
        """Names of all models, as requests may give them."""
        own = self.models or (self.base or self,)
        return (*(name for each in own for name in each.model_names), *self.adapters)

    @property
    def is_loaded(self) -> bool:
        """Whether this model is in memory, and answers."""
        if self.all_models is None:
            return self.client.is_alive
        mine = (each for each in self.all_models.states if each.name == self.model_names[0])
        return any(each.state == LOADED for each in mine)

    def of_model(self, name: object) -> "ApiContext":
        """Return the context of the model or adapter of this name, or this context if there is
        none."""
        if isinstance(name, str) and name in self.adapters:
            return self.adapters[name]
        found = (each for each in self.models if name in each.model_names)
        return next(found, self.base or self)

    async def of_request(self, request_id: str, tenant: str | None) -> "ApiContext":
        """Return the context of the model that runs or retains a request. Return this context if
        there is one model, or if no model has the request."""
        for each in self.models:
            if await each.client.held(request_id, -1, tenant):
                return each
        return self

    def with_model(
        self,
        client: "AsyncClient",
        renderer: Renderer,
        requests: RequestMaker,
        model_names: tuple[str, ...],
    ) -> "ApiContext":
        """Return the context of another model, which shares all other fields with this one."""
        other = copy.copy(self)
        other.client, other.renderer, other.requests = client, renderer, requests
        other.model_names = model_names
        return other

    @property
    def async_renderer(self) -> AsyncRenderer:
        return AsyncRenderer(self.renderer, self.text_threads)


async def context(request: fastapi.Request) -> ApiContext:
    """Return the context of the model that the request's body names. It is async so that FastAPI
    calls it on the event loop instead of in a thread."""
    found: ApiContext = request.app.state.context
    is_one = not (found.models or found.adapters)
    return found if is_one else found.of_model(request.scope.get(MODEL))


async def model_known(api: ApiContext, name: Any) -> None:
    """Wait until the limits of the model `name` are known; an empty name and `default` mean this
    model. An unknown name is refused later. Raise EngineDead or EngineBusy."""
    if api.wait_until_known and (not name or name in (DEFAULT_MODEL, *api.model_names)):
        await api.wait_until_known()


# For handlers: `async def show(api: Api) -> ...`
Api = Annotated[ApiContext, fastapi.Depends(context)]


async def require_known_model(request: fastapi.Request, api: Api) -> None:
    """Wait until the model's limits are known; dependency of routes that do not generate."""
    await model_known(api, request.scope.get(MODEL))
