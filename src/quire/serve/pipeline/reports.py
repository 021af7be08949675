"""What a response reports besides its text, as JSON: the usage of tokens, and times."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.base.messages import Request
from quire.base.requests.outputs import RequestMetrics
from quire.engine.client.async_client import AsyncClient
from quire.engine.observability.prefix_words import shown_to

if TYPE_CHECKING:
    from quire.serve.pipeline.answer import UsageCounter

Json = dict[str, Any]


def usage_json(counters: Sequence["UsageCounter"]) -> Json:
    """Return the usage of all prompts, from one counter for each."""
    prompt = sum([counter.num_prompt for counter in counters])
    completion = sum([counter.num_completion + counter.num_dropped for counter in counters])
    details: Json = {"cached_tokens": sum([counter.num_cached for counter in counters])}
    if len(counters) == 1 and counters[0].prefix is not None:
        details |= shown_to(counters[0].prefix, counters[0].tenant)
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }
    reasoning = [counter.num_reasoning for counter in counters if counter.num_reasoning is not None]
    details = {"reasoning_tokens": sum(reasoning)} if reasoning else {}
    if drafted := sum([counter.num_drafted for counter in counters]):
        accepted = sum([counter.num_accepted for counter in counters])
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = drafted - accepted
    if details:
        usage["completion_tokens_details"] = details
    return usage


async def metrics_json(client: AsyncClient, request: Request, found: RequestMetrics) -> Json:
    """Return the times of a finished request in ms; null for events that did not happen. The time
    in the queue comes from the engine. The mean time between tokens is that of one
    continuation."""
    first_s, last_s, num = found.first_token_s, found.last_token_s, found.num_generation_tokens
    generation_s = None if first_s is None or last_s is None else last_s - first_s
    timeline = json.loads(await client.timeline(request.request_id) or "{}")
    times: Json = {
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
