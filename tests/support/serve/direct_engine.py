"""The engine's answers without a server, to compare with.

Answers come from a twin of the server's engine, because the server's thread steps the original.
"""

from functools import cache
from typing import Any

from quire.base.requests.outputs import RequestOutput
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.config import config_from_flat
from quire.engine.start.build import Engine, build_engine
from quire.render.templates.chat_template import ChatOptions


@cache
def twin() -> Engine:
    return build_engine(
        config_from_flat(
            model="demo",
            max_num_seqs=8,
            max_model_len=512,
            max_num_batched_tokens=256,
            kv_cache_memory_bytes=16 << 20,
            disable_log_stats=True,
        )
    )


def direct(prompt: object, options: ChatOptions | None = None, **params: Any) -> RequestOutput:
    """One request, run alone in this thread. Greedy unless told otherwise."""
    engine = twin()
    rendered = engine.renderer.render(prompt, options)
    request = engine.requests.make(rendered, SamplingParams(**{"temperature": 0.0, **params}))
    engine.client.add(request, rendered.text)
    while True:
        for output in engine.client.step():
            if output.finished:
                return output


def text_of(prompt: object, **params: Any) -> str:
    return direct(prompt, **params).outputs[0].text
