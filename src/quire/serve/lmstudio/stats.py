"""Fields that LM Studio's answers add to OpenAI's: `stats`, `model_info` and `runtime`."""

import contextlib
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from quire.base.errors import EngineDead
from quire.base.version import QUIRE_VERSION
from quire.serve.context import ApiContext
from quire.serve.http.sse import DONE, event
from quire.serve.pipeline.answer import Answer

Json = dict[str, Any]

GGUF, SAFETENSORS = "gguf", "safetensors"
RUNTIME = {"name": "quire", "version": QUIRE_VERSION, "supported_formats": [GGUF, SAFETENSORS]}
# Reason of an answer's end -> reason in LM Studio's words; others keep their name.
REASONS = {"length": "maxPredictedTokensReached", "tool_calls": "toolCalls", "stop": "eosFound"}
STOP_STRING = "stopStringFound"


def card(api: ApiContext, name: str) -> Json:
    """Describe a model, which may never have been loaded."""
    found: Json = {
        "id": name,
        "object": "model",
        "type": "vlm" if api.takes_images else "llm",
        "publisher": name.partition("/")[0] if "/" in name else "",
        "arch": "",
        "compatibility_type": SAFETENSORS,
        "quantization": "",
        "state": "loaded" if api.is_loaded else "not-loaded",
        "max_context_length": None,
    }
    with contextlib.suppress(EngineDead):
        known = api.client.ready
        if known.pooling is not None:
            found["type"] = "embeddings"
        found["arch"] = known.architecture
        found["compatibility_type"] = _format_of(api)
        found["max_context_length"] = known.max_model_len
    return found


def _format_of(api: ApiContext) -> str:
    path = str(api.client.ready.settings.get("model", ""))
    return GGUF if path.endswith(f".{GGUF}") else SAFETENSORS


def additions(api: ApiContext, answer: Answer, choices: Iterable[Json]) -> Json:
    """Return the fields that an answer adds. choices: the ends of its choices."""
    known = api.client.ready
    return {
        "stats": _stats(answer, choices),
        "model_info": {
            "arch": known.architecture,
            "quant": "",
            "format": _format_of(api),
            "context_length": known.max_model_len,
        },
        "runtime": RUNTIME,
    }


def _stats(answer: Answer, choices: Iterable[Json]) -> Json:
    """Return the times of the first prompt, in seconds, and the reason of the first end."""
    usage = answer.choices[0][0].usage
    first_s = total_s = 0.0
    times = usage.metrics
    if times is not None and times.first_token_s is not None:
        first_s = times.first_token_s - times.arrival_s
        total_s = (times.last_token_s or times.first_token_s) - times.first_token_s
    end = next(iter(choices), {})
    reason, stop = end.get("finish_reason"), end.get("stop_reason")
    is_string = reason == "stop" and isinstance(stop, str)
    num_after = max(0, usage.num_completion - 1)  # tokens after the first
    return {
        "tokens_per_second": round(num_after / total_s, 3) if total_s else 0.0,
        "time_to_first_token": round(first_s, 6),
        "generation_time": round(total_s, 6),
        "stop_reason": STOP_STRING if is_string else REASONS.get(reason or "", reason),
    }


async def whole(api: ApiContext, answer: Answer) -> Json:
    """Return the whole answer."""
    found = await answer.whole()
    return found | additions(api, answer, found["choices"])


async def stream(api: ApiContext, answer: Answer) -> AsyncGenerator[bytes, None]:
    """Yield the chunks as events. The chunk in which the last choice ends has the additions."""
    num_open = sum(map(len, answer.choices))
    ends: list[Json] = []
    async with aclosing(answer.chunks()) as pieces:
        async for chunks in pieces:
            for chunk in chunks:
                ended = [each for each in chunk["choices"] if each.get("finish_reason")]
                ends += ended
                if ended and len(ends) == num_open:
                    chunk |= additions(api, answer, ends)
            yield b"".join(map(event, chunks))
    yield DONE
