"""GET /v1/engine/live: server-sent events of what a core is doing, for the page and for others.

    {"type": "snapshot", ...}      all that there is; first, and whenever a difference will not do
    {"type": "difference", ...}    what changed since the last event; the keys of what has not are
                                   absent

The next frame is asked for when the last one was sent, so a slow reader gets fewer of them. A frame
may take seconds: the core makes it between two steps, and rests long after one that took long.
Until it comes, a comment each ALIVE_S shows a reader that the stream is alive.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated

import fastapi
from starlette.responses import Response

from quire.base.live import LiveFrame
from quire.serve.bodies.reading import BoundedRoute
from quire.serve.context import Api, ApiContext
from quire.serve.http.auth import reader_of
from quire.serve.http.sse import DONE, event, start_stream
from quire.serve.native.admin import is_admin
from quire.serve.native.live_events import difference, head, is_another_core, snapshot
from quire.serve.pipeline.plan import check_model

PERIOD_S = 0.2
QUIET_S = 1.0  # after which a reader is told that nothing has changed
ALIVE_S = 1.0  # without an event, after which a comment is sent

router = fastapi.APIRouter(route_class=BoundedRoute)


@router.get("/v1/engine/live")
async def show_live(
    request: fastapi.Request,
    api: Api,
    core: Annotated[int, fastapi.Query(ge=0)] = 0,
    model: str | None = None,
) -> Response:
    """What a core is doing, as server-sent events: a snapshot and then differences, at most five a
    second. On a server with keys each is told of its own requests, and of others' that there are
    some and which blocks they hold; those of admin_api_key are told of all. model: which of
    several."""
    whose = reader_of(request.scope, api.config.api_key)
    tenant = None if is_admin(request.scope, api.config) else whose
    api = api.of_model(model)
    check_model(api, model)
    return await start_stream(request, live_events(api, core, tenant), alive_s=ALIVE_S)


async def live_events(
    api: ApiContext, core: int, tenant: str | None = None
) -> AsyncGenerator[bytes, None]:
    """Yield events until the server is asked to end. tenant: who is told of its own requests alone;
    None is told of all."""
    told: LiveFrame | None = None
    num_cores = api.client.ready.settings.get("data_parallel_size", 1)
    while not api.draining:
        frame = await api.client.live(core)
        if told is None or is_another_core(told, frame):
            yield event(snapshot(frame, tenant) | {"core": core, "num_cores": num_cores})
            told = frame
        elif frame.number != told.number:
            changed = difference(told, frame, tenant)
            if changed or frame.at_s - told.at_s >= QUIET_S:
                yield event({"type": "difference", **head(frame), **changed})
                told = frame
        await asyncio.sleep(PERIOD_S)
    yield DONE
