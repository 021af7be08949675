"""One conversation to render with a chat template, and the interface of renderers.

`InThisProcess` (`template_worker.py`) renders without limits of time and memory. `TemplatePool`
(`template_pool.py`) renders in worker processes with limits.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from quire.render.templates.chat_template import ChatOptions
from quire.render.templates.conversation import plain_data


@dataclass(frozen=True)
class TemplateJob:
    """One conversation and its template."""

    source: str  # the template's text
    variables: Mapping[str, str]  # default variables, such as bos_token
    messages: object
    options: ChatOptions
    is_foreign: bool = False  # whether the template came with the request

    def pack(self) -> bytes:
        """Encode as JSON for `unpack`. Raises RequestError for objects that are not plain data."""
        try:
            return _as_json(self._parts())
        except (TypeError, ValueError, RecursionError):
            return _as_json(self._plain()._parts())

    def _parts(self) -> tuple[Any, ...]:
        o = self.options
        shown = (o.add_generation_prompt, o.continue_final_message, o.tools, o.documents)
        kwargs = o.template_kwargs
        return self.source, dict(self.variables), self.messages, *shown, o.content_format, kwargs

    def _plain(self) -> "TemplateJob":
        """Return the job in JSON's types; a Python caller may have used its own classes."""
        o, messages = self.options, self.messages
        if isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)):
            messages = [plain_data(one, f"messages[{i}]") for i, one in enumerate(messages)]
        else:
            messages = None  # no conversation, so its value does not matter
        options = replace(
            o,
            tools=plain_data(o.tools, "tools"),
            documents=plain_data(o.documents, "documents"),
            template_kwargs=plain_data(o.template_kwargs, "chat_template_kwargs"),
        )
        return replace(self, messages=messages, options=options)


def _as_json(value: object) -> bytes:
    """Encode as JSON, and keep lone surrogates, which a client's JSON may contain."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


class TemplateRunner(Protocol):
    """Renders conversations. Raises RequestError if a template fails, and EngineBusy if too many
    conversations wait."""

    def prepare(self) -> None:
        """Start processes in advance. Call this at most once."""

    def render(self, job: TemplateJob) -> str: ...

    async def render_async(self, job: TemplateJob) -> str:
        """Do the same as `render` without blocking the event loop."""
