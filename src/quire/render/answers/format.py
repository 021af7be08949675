"""Formats of answers: the format of one model, and the answer that one request demands."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from quire.base.requests.structured_outputs import FIELD, StructuredOutputsParams
from quire.render.answers.parser import AnswerParser
from quire.render.answers.syntax import (
    CallFormat,
    NamedBody,
    ParametersBody,
    ReasoningFormat,
    Tool,
    openers,
)


@dataclass(frozen=True)
class AnswerFormat:
    """The way one model writes tool calls and reasoning."""

    calls: CallFormat | None = None  # None if the template supports no tools
    reasoning: ReasoningFormat | None = None  # None if the template supports no reasoning
    # special tokens that the parser must see as text
    shown_special_token_ids: tuple[int, ...] = field(default=(), compare=False)

    def begins_in_reasoning(self, prompt: str) -> bool:
        """Return whether the prompt ends with the mark that opens reasoning."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.open.rstrip())

    def has_reasoned(self, prompt: str) -> bool:
        """Return whether the prompt ends with the mark that closes reasoning.

        Templates write this mark when thinking is off. Always False for formats whose content has
        an opening mark of its own."""
        form = self.reasoning
        if form is None or form.content_open:
            return False
        return prompt.rstrip().endswith(form.close.rstrip())

    def marks(self) -> Iterator[str]:
        """List the marks that structure an answer; some may be empty."""
        if self.reasoning is not None:
            reasoning = self.reasoning
            yield from (reasoning.open, reasoning.close, reasoning.content_open, *reasoning.silent)
        for syntax in self.calls.syntaxes if self.calls is not None else ():
            yield from (syntax.begin, syntax.open, syntax.close, syntax.between, syntax.end)
            match syntax.body:
                case NamedBody(after_name):
                    yield after_name
                case ParametersBody() as body:
                    yield from (body.after_name, body.open, body.after_key, body.close)


@dataclass(frozen=True)
class NamedTool:
    """The tool choice that forces one tool."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True)
class RequestedAnswer:
    """The answer that one request demands. `answer_grammar` in grammar.py builds its grammar."""

    format: AnswerFormat
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = "auto"
    parallel: bool = True  # whether the answer may contain several calls
    content: StructuredOutputsParams | None = None  # constraint on the content
    content_field: str = FIELD  # request field that holds the constraint, for errors
    strict: bool = False  # whether a schema feature without support is an error
    begins_in_reasoning: bool = False  # whether the prompt opens the reasoning
    has_reasoned: bool = False  # whether the prompt closes the reasoning; no more may follow
    thinking_token_budget: int | None = None  # maximum number of reasoning tokens

    @property
    def calls(self) -> CallFormat | None:
        """The format of this answer's calls; None if it must have none."""
        return self.format.calls if self.tools and self.choice != "none" else None

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar must constrain the answer."""
        if self.content is not None or self.thinking_token_budget is not None:
            return True
        if self.choice not in ("auto", "none") or self.bans_calls:
            return True
        return self.has_bound_calls and self.calls is not None

    @property
    def bans_calls(self) -> bool:
        """Whether the prompt shows tools that the answer must not call. False for a format without
        opening marks, where a call is a JSON object and any text may be one."""
        is_shown = bool(self.tools) and self.choice == "none"
        return is_shown and bool(openers(self.format.calls))

    @property
    def has_bound_calls(self) -> bool:
        """Whether optional calls are constrained, by a strict tool or a limit of one call."""
        return not self.parallel or any(tool.strict for tool in self.tools)

    def parser(self) -> AnswerParser:
        """Return a new parser for one of the request's answers."""
        return AnswerParser(self.calls, self.format.reasoning, self.tools, self.begins_in_reasoning)
