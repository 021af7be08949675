"""HTTP side of rate limits: 429 with Retry-After, and OpenAI's headers with the remaining amounts
on each response."""

import math

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.base.tenants import key_index
from quire.serve.context import ApiContext
from quire.serve.http.auth import tenant_of
from quire.serve.observers.observed_client import too_many
from quire.serve.observers.rate_limits import RateLimits

KEY_STATE = "rate_key"  # in the scope's state: index of the key that a request counts for
HEADERS = tuple(
    f"x-ratelimit-{quantity}-{kind}"
    for quantity in ("limit", "remaining", "reset")
    for kind in ("requests", "tokens")
)


def admit(rates: RateLimits, api: ApiContext, scope: Scope) -> None:
    """Count a request that generates against its key's limits. Raise ApiError 429 if a limit is
    used up."""
    key = key_index(tenant_of(scope, api.config.api_key, None))
    scope.setdefault("state", {})[KEY_STATE] = key
    refused = rates.admit(key)
    if refused is not None:
        raise too_many(refused)


class RateHeaders:
    """Middleware that adds the remaining limits to responses of generating requests."""

    def __init__(self, app: ASGIApp, rates: RateLimits) -> None:
        self._app = app
        self._rates = rates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_limits(message: Message) -> None:
            key = scope.get("state", {}).get(KEY_STATE)
            if message["type"] == "http.response.start" and key is not None:
                headers = MutableHeaders(scope=message)
                for kind, level in self._rates.levels(key).items():
                    headers[f"x-ratelimit-limit-{kind}"] = str(level.limit)
                    headers[f"x-ratelimit-remaining-{kind}"] = str(level.num_left)
                    headers[f"x-ratelimit-reset-{kind}"] = _duration(level.full_s)
            await send(message)

        await self._app(scope, receive, send_with_limits)


def _duration(seconds: float) -> str:
    """Format a duration as OpenAI does: 20ms, 1.5s, 6m0s."""
    ms = math.ceil(seconds * 1000)
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{ms / 1000:g}s"
