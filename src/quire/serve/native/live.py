"""GET /v1/engine/live: the state of a core as server-sent events, for the web page and others.

    {"type": "snapshot", ...}      the whole state; sent first, and after a restart of the core
    {"type": "difference", ...}    changes since the last event; the keys of unchanged values are
                                   absent

The next frame is requested after the last one was sent, so a slow reader gets fewer frames. A frame
may take seconds. The core makes it between two steps, and pauses for long after a slow one. In the
meantime a comment every ALIVE_S shows the reader that the stream is alive.
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
QUIET_S = 1.0  # interval of events while nothing changes
ALIVE_S = 1.0  # quiet seconds after which a comment is sent

router = fastapi.APIRouter(route_class=BoundedRoute)


@router.get("/v1/engine/live")
async def show_live(
    request: fastapi.Request,
    api: Api,
    core: Annotated[int, fastapi.Query(ge=0)] = 0,
    model: str | None = None,
) -> Response:
    """Stream the state of a core as server-sent events: a snapshot, then up to five differences per
    second. With keys, a client sees details of its own requests only. Of other requests it sees
    their number and their blocks. An admin key sees all. model: which model, if there are
    several."""
    reader = reader_of(request.scope, api.config.api_key)
    tenant = None if is_admin(request.scope, api.config) else reader
    api = api.of_model(model)
    check_model(api, model)
    return await start_stream(request, live_events(api, core, tenant), alive_s=ALIVE_S)


async def live_events(
    api: ApiContext, core: int, tenant: str | None = None
) -> AsyncGenerator[bytes, None]:
    """Yield events until the server shuts down. tenant: the tenant whose requests are shown in
    detail; None shows all."""
    last_sent: LiveFrame | None = None
    num_cores = api.client.ready.settings.get("data_parallel_size", 1)
    while not api.draining:
        frame = await api.client.live(core)
        if last_sent is None or is_another_core(last_sent, frame):
            yield event(snapshot(frame, tenant) | {"core": core, "num_cores": num_cores})
            last_sent = frame
        elif frame.number != last_sent.number:
            changed = difference(last_sent, frame, tenant)
            if changed or frame.at_s - last_sent.at_s >= QUIET_S:
                yield event({"type": "difference", **head(frame), **changed})
                last_sent = frame
        await asyncio.sleep(PERIOD_S)
    yield DONE
