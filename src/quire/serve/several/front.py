"""One model in an API process: its text side and the client of its core."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.base.settings.config import ServerConfig
from quire.engine.client.async_client import AsyncClient
from quire.engine.client.fleet import CoreClient, client_of
from quire.engine.start.text import TextSide, build_text_side
from quire.models.checkpoint.source import ModelSource
from quire.serve.context import ApiContext
from quire.serve.observers.observers import Observers
from quire.serve.observers.rate_limits import RateLimits
from quire.serve.several.all_models import AllModels
from quire.serve.several.leased_client import LeasedClient
from quire.serve.several.link import ModelLink
from quire.serve.several.served import ApiModel


@dataclass(frozen=True)
class ModelFront:
    """The parts of one model in an API process."""

    names: tuple[str, ...]
    text: TextSide
    core: CoreClient  # client of the core
    leased: LeasedClient | None  # wrapper of `core` that loads the model on demand
    observers: Observers  # wrapper of `leased` or `core`, which the API calls

    @classmethod
    def make(
        cls,
        model: ApiModel,
        source: ModelSource,
        server: ServerConfig,
        index: int,
        rates: RateLimits | None,
        link: ModelLink | None,
    ) -> "ModelFront":
        """Read a model's text side, and begin to connect to its core. index: number of this API
        process. Raises ModelError and ConfigError."""
        text = build_text_side(model.model, source, index)
        text.renderer.prepare()
        core = client_of([Path(path) for path in model.cores], text.tokenizer)
        core.start()
        names = model.names or (source.name,)
        leased = None if link is None else LeasedClient(core, link, names[0])
        client: AsyncClient = core if leased is None else leased
        observers = Observers(client, server, names[0], rates)
        return cls(names, text, core, leased, observers)


def share_context(context: ApiContext, fronts: Sequence[ModelFront], link: ModelLink) -> None:
    """Create the contexts of all models and link them to each other. context: the first model's."""
    others = [
        context.with_model(
            front.observers.client, front.text.renderer, front.text.requests, front.names
        )
        for front in fronts[1:]
    ]
    context.models = (context, *others)
    clients = {front.names[0]: front.observers.client for front in fronts}
    all_models = AllModels(clients, link, context.config.metrics_prefix)
    for each, front in zip(context.models, fronts, strict=True):
        assert front.leased is not None
        each.models, each.all_models = context.models, all_models
        each.wait_until_known = front.leased.wait_until_known
