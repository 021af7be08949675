"""How long a request took, in its answer: `--enable-per-request-metrics`, with vLLM's names."""

import json
from typing import Any

from quire.base.messages import Request
from quire.base.outputs import RequestMetrics
from quire.engine.client.async_client import AsyncClient

Json = dict[str, Any]


async def metrics_json(client: AsyncClient, request: Request, found: RequestMetrics) -> Json:
    """Write the times of a request that is over, in ms; null for what did not happen. How long it
    was in the queue knows the engine alone, which is asked. The mean time between two tokens is
    that of one continuation."""
    first_s, last_s, num = found.first_token_s, found.last_token_s, found.num_generation_tokens
    generation_s = None if first_s is None or last_s is None else last_s - first_s
    timeline = json.loads(await client.timeline(request.request_id) or "{}")
    told: Json = {
        "time_to_first_token_ms": None if first_s is None else _ms(first_s - found.arrival_s),
        "generation_time_ms": None if generation_s is None else _ms(generation_s),
        "queue_time_ms": timeline.get("waited_ms"),
        "mean_itl_ms": None,
        "tokens_per_second": None,
    }
    if generation_s and num > 1:
        num_samples = request.params.num_samples
        told["tokens_per_second"] = round((num - 1) / generation_s, 3)
        if num > num_samples:
            told["mean_itl_ms"] = _ms(generation_s * num_samples / (num - num_samples))
    if found.num_draft_tokens:
        told["speculative_decoding"] = {
            "num_draft_tokens": found.num_draft_tokens,
            "num_accepted_tokens": found.num_accepted_draft_tokens,
        }
    return told


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
