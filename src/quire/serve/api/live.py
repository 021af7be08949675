"""GET /v1/engine/live: server-sent events of what a core is doing, for the page and for others.

    {"type": "snapshot", ...}      all that there is; first, and whenever a difference will not do
    {"type": "difference", ...}    what changed since the last event; the keys of what has not are
                                   absent

The next frame is asked for when the last one was sent, so a slow reader gets fewer of them.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any

import fastapi
import numpy as np
from starlette.responses import Response

from quire.base.live import REASONS, STATES, BlockMap, LiveFrame, LiveState, RunningRow, WaitingRow
from quire.serve.api.admin import check_admin
from quire.serve.api.context import Api, ApiContext
from quire.serve.api.reading import BoundedRoute
from quire.serve.api.sse import DONE, event, start_stream

PERIOD_S = 0.2
QUIET_S = 1.0  # after which a reader is told that nothing has changed

Json = dict[str, Any]

router = fastapi.APIRouter(route_class=BoundedRoute)


@router.get("/v1/engine/live")
async def show_live(
    request: fastapi.Request, api: Api, core: Annotated[int, fastapi.Query(ge=0)] = 0
) -> Response:
    """What a core is doing, as server-sent events: a snapshot and then differences, at most five a
    second; on a server with keys for admin_api_key alone."""
    check_admin(request.scope, api.config, "what the engine is doing tells of all keys' requests")
    return await start_stream(request, live_events(api, core))


async def live_events(api: ApiContext, core: int) -> AsyncGenerator[bytes, None]:
    """Yield events until the server is asked to end."""
    told: LiveFrame | None = None
    num_cores = api.client.ready.settings.get("data_parallel_size", 1)
    while not api.draining:
        frame = await api.client.live(core)
        if told is None or _is_another_core(told, frame):
            yield event(snapshot(frame) | {"core": core, "num_cores": num_cores})
            told = frame
        elif frame.number != told.number:
            changed = difference(told, frame)
            if changed or frame.at_s - told.at_s >= QUIET_S:
                yield event({"type": "difference", **_head(frame), **changed})
                told = frame
        await asyncio.sleep(PERIOD_S)
    yield DONE


def _is_another_core(told: LiveFrame, frame: LiveFrame) -> bool:
    """Tell whether the core was started anew between two frames."""
    sizes = [[len(group.states) for group in each.state.groups] for each in (told, frame)]
    return frame.number < told.number or sizes[0] != sizes[1]


def snapshot(frame: LiveFrame) -> Json:
    """Return all that a frame tells. Owners and sharers are in the order of the blocks; a state is
    its place in `states`."""
    state = frame.state
    return {
        "type": "snapshot",
        **_head(frame),
        "states": STATES,
        "reasons": REASONS,
        "block_size": state.block_size,
        "num_rows": state.num_rows,
        "token_budget": state.token_budget,
        "groups": [
            {
                "kind": group.kind,
                "owners": group.owners.tolist(),
                "sharers": group.sharers.tolist(),
                "states": group.states.tolist(),
            }
            for group in state.groups
        ],
        "running": _running(state),
        "waiting": _waiting(state),
        "num_waiting": state.num_waiting,
        "steps": _steps(frame, -1),
        "events": [],
        "counts": dict.fromkeys(frame.counts, 0),
    }


def difference(told: LiveFrame, frame: LiveFrame) -> Json:
    """Return what changed between two frames of a core."""
    old, new = told.state, frame.state
    changed: Json = {}
    pairs = enumerate(zip(old.groups, new.groups, strict=True))
    groups = [found for g, pair in pairs if (found := _changed_blocks(g, *pair))]
    if groups:
        changed["groups"] = groups
    if old.running != new.running:
        changed["running"] = _running(new)
    if old.waiting != new.waiting or old.num_waiting != new.num_waiting:
        changed |= {"waiting": _waiting(new), "num_waiting": new.num_waiting}
    if steps := _steps(frame, told.steps[-1].number if told.steps else -1):
        changed["steps"] = steps
    last = told.events[-1].number if told.events else 0
    if events := [[e.kind, e.group, e.block] for e in frame.events if e.number > last]:
        changed["events"] = events
    counts = {kind: num - told.counts.get(kind, 0) for kind, num in frame.counts.items()}
    if any(counts.values()):
        changed["counts"] = {kind: max(0, num) for kind, num in counts.items() if num}
    return changed


def _changed_blocks(g: int, old: BlockMap, new: BlockMap) -> Json | None:
    """Return the blocks of a group that are not as they were, with what they are; None if all
    are."""
    is_changed = (old.owners != new.owners) | (old.sharers != new.sharers)
    blocks = np.flatnonzero(is_changed | (old.states != new.states))
    if not len(blocks):
        return None
    return {
        "group": g,
        "blocks": blocks.tolist(),
        "owners": new.owners[blocks].tolist(),
        "sharers": new.sharers[blocks].tolist(),
        "states": new.states[blocks].tolist(),
    }


def _head(frame: LiveFrame) -> Json:
    return {"frame": frame.number, "at_s": round(frame.at_s, 4)}


def _running(state: LiveState) -> list[Json]:
    return [_told(row) for row in state.running]


def _waiting(state: LiveState) -> list[Json]:
    return [_told(row) for row in state.waiting]


def _told(row: RunningRow | WaitingRow) -> Json:
    return {name: getattr(row, name) for name in row.__struct_fields__}


def _steps(frame: LiveFrame, after: int) -> list[Json]:
    return [
        {
            "step": step.number,
            "at_s": round(step.at_s, 4),
            "prefill_tokens": step.prefill_tokens,
            "decode_tokens": step.decode_tokens,
            "sampled_tokens": step.num_sampled,
            "duration_ms": round(1000 * step.duration_s, 3),
        }
        for step in frame.steps
        if step.number > after
    ]
