"""How a request enters an engine: every door passes what `RequestMaker` made through `admit`.

    fields of a door -> prompt, parameters -> checked_grammar -> RequestMaker -> admit -> client

`RequestLimits.check` (base/requests/validation.py) holds the rules. `admit` applies them before
anything is sent, each client repeats them, and so does the core (engine/loop/front.py).
"""

from typing import Any, Protocol

import msgspec

from quire.base.messages import Request
from quire.base.requests.sampling_params import SamplingParams
from quire.render.answers.format import AnswerFormat
from quire.render.answers.grammar import params_grammar
from quire.render.renderer import RenderedPrompt, Renderer


class Checks(Protocol):
    """Part of a client that `admit` needs: the check of requests."""

    def check(self, request: Request) -> None: ...


def admit(client: Checks, made: Request, **own: Any) -> Request:
    """Return a request with its door's own fields, such as keep_s or core_id. Raise RequestError if
    the engine can never serve it."""
    request = msgspec.structs.replace(made, **own) if own else made
    client.check(request)
    return request


def checked_grammar(
    renderer: Renderer,
    params: SamplingParams,
    prompt: RenderedPrompt,
    form: AnswerFormat | None = None,
) -> str:
    """Return the grammar of an answer, compiled once within limits; empty for an answer that may be
    anything. form: of the template that made a conversation. Raise RequestError."""
    if not params.is_constrained:
        return ""
    return renderer.grammars.check(params_grammar(renderer, params, prompt, form)).text


async def checked_grammar_async(
    renderer: Renderer,
    params: SamplingParams,
    prompt: RenderedPrompt,
    form: AnswerFormat | None = None,
) -> str:
    """Do the same without holding up the event loop."""
    if not params.is_constrained:
        return ""
    grammar = params_grammar(renderer, params, prompt, form)
    return (await renderer.grammars.check_async(grammar)).text
