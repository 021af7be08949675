"""The times of a finished request, for clients that request them."""

import json
from typing import Any

from quire.base.messages import Request
from quire.base.requests.outputs import RequestMetrics
from quire.engine.client.async_client import AsyncClient


async def metrics_json(
    client: AsyncClient, request: Request, found: RequestMetrics
) -> dict[str, Any]:
    """Return the times of a finished request in ms; null for events that did not happen. The time
    in the queue comes from the engine. The mean time between tokens is that of one
    continuation."""
    first_s, last_s, num = found.first_token_s, found.last_token_s, found.num_generation_tokens
    generation_s = None if first_s is None or last_s is None else last_s - first_s
    timeline = json.loads(await client.timeline(request.request_id) or "{}")
    times: dict[str, Any] = {
        "time_to_first_token_ms": None if first_s is None else _ms(first_s - found.arrival_s),
        "generation_time_ms": None if generation_s is None else _ms(generation_s),
        "queue_time_ms": timeline.get("waited_ms"),
        "mean_itl_ms": None,
        "tokens_per_second": None,
    }
    if generation_s and num > 1:
        num_samples = request.params.num_samples
        times["tokens_per_second"] = round((num - 1) / generation_s, 3)
        if num > num_samples:
            times["mean_itl_ms"] = _ms(generation_s * num_samples / (num - num_samples))
    if found.num_draft_tokens:
        times["speculative_decoding"] = {
            "num_draft_tokens": found.num_draft_tokens,
            "num_accepted_tokens": found.num_accepted_draft_tokens,
        }
    return times


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
