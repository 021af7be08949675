"""Formats of answers: the format of one model, and the answer that one request demands."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from quire.base.errors import RequestError
from quire.base.requests.structured_outputs import FIELD, StructuredOutputsParams
from quire.render.answers.detect import call_format, reasoning_format
from quire.render.answers.grammar import calls_rule, free_rule, reasoning_rule, spaced
from quire.render.answers.parser import AnswerParser
from quire.render.answers.syntax import CallFormat, NamedBody, ParametersBody, ReasoningFormat, Tool
from quire.render.grammars.lark import ANY_TEXT, Lark
from quire.render.grammars.structured import content_rule
from quire.render.tokens.tokenizer import Tokenizer

NO_CALLS = (
    "a tool cannot be forced: this model's chat template shows no format of tool calls; start the"
    " server with --tool-call-parser, or remove tool_choice."
)
NO_REASONING = (
    "thinking_token_budget={}: no reasoning format is known for this prompt; remove it and use"
    " max_tokens, or set --reasoning-parser."
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


def detect_format(
    template: str | None,
    tokenizer: Tokenizer | None,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
) -> AnswerFormat:
    """Return the format of a model's answers, from its chat template or from parser names.

    The names are vLLM's parser names, a plug-in's name, or `none` to read nothing of that kind.
    Raises ConfigError for unknown names."""
    template = template or ""
    tokens = () if tokenizer is None else tokenizer.added_tokens.values()
    found = AnswerFormat(
        call_format(tool_call_parser, template, tokens),
        reasoning_format(reasoning_parser, template),
    )
    if tokenizer is None:
        return found
    return replace(found, shown_special_token_ids=special_token_ids_in(found, tokenizer))


def special_token_ids_in(form: AnswerFormat, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of the special tokens that occur in the format's marks."""
    texts = [text for text in form.marks() if text]
    added = tokenizer.added_tokens
    return tuple(
        token_id
        for token_id in sorted(tokenizer.special_ids)
        if any(added[token_id] in text for text in texts)
    )


@dataclass(frozen=True)
class NamedTool:
    """The tool choice that forces one tool."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True)
class AskedAnswer:
    """The answer that one request demands. Builds the answer's grammar and its parser."""

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
        if self.choice not in ("auto", "none"):
            return True
        return self._is_bound and self.calls is not None

    @property
    def _is_bound(self) -> bool:
        """Whether optional calls are constrained, by a strict tool or a limit of one call."""
        return not self.parallel or any(tool.strict for tool in self.tools)

    def grammar(self, added_tokens: Mapping[str, int]) -> str:
        """Return the Lark grammar of the whole answer; an empty string if it is unconstrained.

        added_tokens: the tokenizer's added tokens, from text to id. Raises RequestError."""
        if not self.is_constrained:
            return ""
        lark = Lark(added_tokens)
        reasoning = self.format.reasoning
        rest = self._after_reasoning(lark)
        budget = self.thinking_token_budget
        if budget is not None and reasoning is None:
            raise RequestError(NO_REASONING.format(budget), "thinking_token_budget")
        if reasoning is None:
            assert rest is not None, "then only a budget is set"
            return lark.text(rest)
        rest = rest or self._anything(lark, reasoning)
        if self.has_reasoned:
            return lark.text(rest)
        first = reasoning_rule(lark, reasoning, self.begins_in_reasoning, budget)
        return lark.text(f"{first} {rest}")

    def _after_reasoning(self, lark: Lark) -> str | None:
        """Return the expression for the text after the reasoning; None if it is unconstrained."""
        content = None
        if self.content is not None:
            content = content_rule(lark, self.content, strict=self.strict, field=self.content_field)
            content = f"{spaced(lark, self._content_open)} {content}"
        calls = self.calls
        if calls is None:
            if self.choice not in ("auto", "none"):
                raise RequestError(NO_CALLS, "tool_choice")
            return content
        if self.choice != "auto":
            several = self.parallel and self.choice == "required"
            return calls_rule(lark, calls, self._choosable(), several)
        if content is not None:
            return f"({calls_rule(lark, calls, self.tools, self.parallel)} | {content})"
        if self._is_bound:
            return free_rule(lark, calls, self.format.reasoning, self.tools, self.parallel)
        return None

    def _anything(self, lark: Lark, reasoning: ReasoningFormat) -> str:
        """Return the expression for any text after the reasoning, except a second reasoning."""
        if not reasoning.content_open:
            return lark.tokens(but=[reasoning.open])
        if self.calls is not None:
            return free_rule(lark, self.calls, reasoning, self.tools, self.parallel)
        return f"{spaced(lark, reasoning.content_open)} {ANY_TEXT}"

    @property
    def _content_open(self) -> str:
        return self.format.reasoning.content_open if self.format.reasoning is not None else ""

    def _choosable(self) -> tuple[Tool, ...]:
        """Return the tools that `choice` allows. Raises RequestError for an unknown name."""
        if not isinstance(self.choice, NamedTool):
            return self.tools
        name = self.choice.name
        found = tuple(tool for tool in self.tools if tool.name == name)
        if not found:
            raise RequestError(f"tool_choice names {name!r}, which is not in tools.", "tool_choice")
        return found

    def parser(self) -> AnswerParser:
        """Return a new parser for one of the request's answers."""
        return AnswerParser(self.calls, self.format.reasoning, self.tools, self.begins_in_reasoning)
