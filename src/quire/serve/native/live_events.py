"""Events of `GET /v1/engine/live` as data: a whole frame, or the changes between two frames.

The playback of recordings makes the same events (`tools/playback.py`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.base.live import (
    REASONS,
    STATES,
    BlockMap,
    LiveFrame,
    LiveState,
    PinnedRow,
    RetainedRow,
    RunningRow,
    WaitingRow,
)

Json = dict[str, Any]
Row = RunningRow | WaitingRow | PinnedRow | RetainedRow


def is_another_core(previous: LiveFrame, frame: LiveFrame) -> bool:
    """Return whether the core was restarted between two frames."""
    sizes = [[len(group.states) for group in each.state.groups] for each in (previous, frame)]
    return frame.number < previous.number or sizes[0] != sizes[1]


def snapshot(frame: LiveFrame, tenant: str | None = None) -> Json:
    """Return a whole frame. Owners and sharers are in the order of blocks, and a state is an index
    into `states`. tenant: the tenant whose requests are shown in detail; others appear only as
    numbers of blocks and requests. None shows all."""
    state = frame.state
    return {
        "type": "snapshot",
        **head(frame),
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
        **_lists(state, tenant),
        "steps": _steps(frame, -1),
        "events": [],
        "counts": dict.fromkeys(frame.counts, 0),
    }


def difference(previous: LiveFrame, frame: LiveFrame, tenant: str | None = None) -> Json:
    """Return the changes between two frames of a core. tenant: as in `snapshot`."""
    old, new = previous.state, frame.state
    changed: Json = {}
    pairs = enumerate(zip(old.groups, new.groups, strict=True))
    groups = [found for g, pair in pairs if (found := _changed_blocks(g, *pair))]
    if groups:
        changed["groups"] = groups
    before = _lists(old, tenant)
    changed |= {name: now for name, now in _lists(new, tenant).items() if now != before[name]}
    if steps := _steps(frame, previous.steps[-1].number if previous.steps else -1):
        changed["steps"] = steps
    last = previous.events[-1].number if previous.events else 0
    if events := [[e.kind, e.group, e.block] for e in frame.events if e.number > last]:
        changed["events"] = events
    counts = {kind: num - previous.counts.get(kind, 0) for kind, num in frame.counts.items()}
    if any(counts.values()):
        changed["counts"] = {kind: max(0, num) for kind, num in counts.items() if num}
    return changed


def _changed_blocks(g: int, old: BlockMap, new: BlockMap) -> Json | None:
    """Return the changed blocks of a group with their new values; None if no block has changed."""
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


def head(frame: LiveFrame) -> Json:
    """Return the fields that begin each event."""
    return {"frame": frame.number, "at_s": round(frame.at_s, 4)}


def _lists(state: LiveState, tenant: str | None) -> Json:
    """Return the lists of requests and pins that the tenant may see, and the total counts."""
    return {
        "running": _visible_rows(state.running, tenant),
        "num_running": len(state.running),
        "waiting": _visible_rows(state.waiting, tenant),
        "num_waiting": state.num_waiting,
        "pinned": _visible_rows(state.pinned, tenant),
        "held": _visible_rows(state.held, tenant),
        "num_held": state.num_held,
        "host": {name: getattr(state.host, name) for name in state.host.__struct_fields__},
    }


def _visible_rows(rows: Sequence[Row], tenant: str | None) -> list[Json]:
    return [
        {name: getattr(row, name) for name in row.__struct_fields__ if name != "tenant"}
        for row in rows
        if tenant in (None, row.tenant)
    ]


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
