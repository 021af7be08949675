"""Requests to all models of a server at once, such as metrics, request timelines and pinned
prefixes."""

from collections.abc import Mapping, Sequence

import msgspec

from quire.base.messages import PinnedPrefix, RetainedRequest
from quire.engine.client.async_client import AsyncClient
from quire.engine.observability.merged_metrics import merged
from quire.serve.several.link import ModelLink
from quire.serve.several.messages import LOADED, ModelState

NO_ANSWER = "its process does not answer."


class AllModels:
    """Client of all models of a server. clients: client of each model, by its first name; clients
    of unloaded models return empty results. metrics_prefix: prefix of the metrics' names."""

    def __init__(
        self, clients: Mapping[str, AsyncClient], link: ModelLink, metrics_prefix: str = "quire"
    ) -> None:
        self._clients = clients
        self._link = link
        self._metrics_prefix = metrics_prefix

    @property
    def states(self) -> list[ModelState]:
        return [self._state(name) for name in self._clients]

    def _state(self, name: str) -> ModelState:
        """Return the supervisor's view of a model, with NO_ANSWER if its core does not answer."""
        reported = self._link.states[name]
        if reported.state == LOADED and not self._clients[name].is_alive:
            return msgspec.structs.replace(reported, why=NO_ANSWER)
        return reported

    @property
    def is_alive(self) -> bool:
        """Whether any model answers, or can be loaded by a request."""
        return any(client.is_alive for client in self._clients.values())

    async def metrics(self) -> str:
        """Return the metrics of all loaded models, and the state of every model."""
        names = list(self._clients)
        texts = {names.index(name): await each.metrics() for name, each in self._clients.items()}
        texts[len(names)] = _states_text(self.states, self._metrics_prefix)
        return merged({number: text for number, text in texts.items() if text})

    async def timeline(self, request_id: str, tenant: str | None = None) -> str:
        for client in self._clients.values():
            if text := await client.timeline(request_id, tenant):
                return text
        return ""

    async def prefixes(self, tenant: str | None = None) -> list[PinnedPrefix]:
        found: list[PinnedPrefix] = []
        for client in self._clients.values():
            found += await client.prefixes(tenant)
        return sorted(found, key=lambda prefix: -prefix.age_s)

    async def unpin(self, prefix_id: str, tenant: str | None = None) -> bool:
        return any([await each.unpin(prefix_id, tenant) for each in self._clients.values()])

    async def held(self, tenant: str | None = None) -> list[RetainedRequest]:
        found: list[RetainedRequest] = []
        for client in self._clients.values():
            found += await client.held(tenant=tenant)
        return found

    async def reset_prefix_cache(self) -> None:
        for client in self._clients.values():
            await client.reset_prefix_cache()

    async def cancel(self, request_ids: list[str] | None, tenant: str | None = None) -> list[str]:
        found: list[str] = []
        for client in self._clients.values():
            found += await client.cancel(request_ids, tenant)
        return found


def _states_text(states: Sequence[ModelState], prefix: str) -> str:
    """Return the states of models as metrics in Prometheus' text format."""
    lines = [
        f"# HELP {prefix}:model_state State of each model: 1 for the current state.",
        f"# TYPE {prefix}:model_state gauge",
    ]
    lines += [
        f'{prefix}:model_state{{model_name="{_quoted(each.name)}",state="{each.state}"}} 1'
        for each in states
    ]
    lines += [
        f"# HELP {prefix}:model_loads_total Number of times each model was loaded.",
        f"# TYPE {prefix}:model_loads_total counter",
    ]
    lines += [
        f'{prefix}:model_loads_total{{model_name="{_quoted(each.name)}"}} {each.num_loads}'
        for each in states
    ]
    return "".join(f"{line}\n" for line in lines)


def _quoted(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
