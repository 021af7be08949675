"""How a model answers (`AnswerFormat`), and what a request asks of one answer (`AskedAnswer`)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from quire.base.structured_outputs import StructuredOutputsParams
from quire.render.answers.detect import call_format, reasoning_format
from quire.render.answers.parser import AnswerParser
from quire.render.answers.syntax import CallFormat, ParametersBody, ReasoningFormat, Tool
from quire.render.tokenizer import Tokenizer


@dataclass(frozen=True)
class AnswerFormat:
    """Of one model. None: its template knows no tools, or no reasoning."""

    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None

    def begins_in_reasoning(self, prompt: str) -> bool:
        """Tell whether this prompt ends with the mark that opens reasoning."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.open.rstrip())

    def marks(self) -> Iterator[str]:
        """List the texts that structure an answer."""
        if self.reasoning is not None:
            reasoning = self.reasoning
            yield from (reasoning.open, reasoning.close, reasoning.content_open, *reasoning.silent)
        for syntax in self.calls.syntaxes if self.calls is not None else ():
            yield from (syntax.begin, syntax.open, syntax.close, syntax.between, syntax.end)
            if isinstance(syntax.body, ParametersBody):
                body = syntax.body
                yield from (body.after_name, body.open, body.after_key, body.close)


def detect_format(
    template: str | None,
    tokenizer: Tokenizer | None,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
) -> AnswerFormat:
    """Return how a model answers, by its chat template or by the names of formats (vLLM's names
    of parsers, or a plug-in's; `none`: nothing of the kind is read).

    Raises ConfigError for unknown names.
    """
    template = template or ""
    tokens = () if tokenizer is None else tokenizer.added_tokens.values()
    return AnswerFormat(
        call_format(tool_call_parser, template, tokens),
        reasoning_format(reasoning_parser, template),
    )


@dataclass(frozen=True)
class NamedTool:
    """The choice of exactly this tool."""

    name: str


@dataclass(frozen=True)
class AskedAnswer:
    """Of one request. parallel: whether there may be several calls. content: the form of what is
    neither reasoning nor a call; strict: what its schema asks for and cannot be had is an error.
    begins_in_reasoning: the prompt has opened it. thinking_token_budget: of the reasoning."""

    format: AnswerFormat
    tools: tuple[Tool, ...] = ()
    choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    parallel: bool = True
    content: StructuredOutputsParams | None = None
    strict: bool = False
    begins_in_reasoning: bool = False
    thinking_token_budget: int | None = None

    @property
    def calls(self) -> CallFormat | None:
        """How the calls of this answer are written; None if it must have none."""
        return self.format.calls if self.tools and self.choice != "none" else None

    def parser(self) -> AnswerParser:
        """Return a parser for one answer (of n)."""
        return AnswerParser(self.calls, self.format.reasoning, self.tools, self.begins_in_reasoning)

    def shown_special_token_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the special tokens that the parser must see as text."""
        texts = [text for text in self.format.marks() if text]
        added = tokenizer.added_tokens
        return tuple(
            token_id
            for token_id in sorted(tokenizer.special_ids)
            if any(added[token_id] in text for text in texts)
        )
