"""The jinja2 environment of chat templates: sandboxed, with the functions that templates call.

A template comes from a model's files or from a request, so it is untrusted code. It sees only plain
data and cannot change the data. `job_worker.py` limits its time and memory.
"""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationTag(Extension):
    """Ignore `{% generation %}...{% endgeneration %}`, which matters only for training."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_environment(
    now: Callable[[], datetime] = datetime.now,
) -> ImmutableSandboxedEnvironment:
    """Return the environment that Hugging Face templates expect. now: clock for their dates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, LoopControlExtension]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the escapes for HTML that jinja2's own filter adds."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
