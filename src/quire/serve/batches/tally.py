"""Counts of a batch's progress, taken from its output lines."""

from dataclasses import dataclass
from typing import Any

import msgspec

from quire.serve.batches.lines import OutputLine


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0
    reasoning_tokens: int | None = 0


class _Usage(msgspec.Struct):
    """Usage, under the field names of all endpoints; a response has some of them."""

    prompt_tokens: int | None = 0
    input_tokens: int | None = 0
    completion_tokens: int | None = 0
    output_tokens: int | None = 0
    cache_read_input_tokens: int | None = 0  # not included in input_tokens
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


@dataclass
class Tally:
    """Counts of lines with a response, failed lines, and tokens of the responses."""

    num_completed: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0

    @property
    def num_done(self) -> int:
        return self.num_completed + self.num_failed

    def add(self, line: OutputLine) -> None:
        """Count an output line."""
        if line.is_failed or line.response is None:
            self.num_failed += 1
            return
        self.num_completed += 1
        try:
            usage = msgspec.json.decode(line.response.body, type=_Body).usage
        except msgspec.MsgspecError:  # the endpoint reports no usage
            return
        if usage is None:
            return
        read = usage.cache_read_input_tokens or 0
        self.num_prompt_tokens += usage.prompt_tokens or (usage.input_tokens or 0) + read
        self.num_output_tokens += usage.completion_tokens or usage.output_tokens or 0
        prompt = usage.prompt_tokens_details or usage.input_tokens_details
        self.num_cached_tokens += read if prompt is None else prompt.cached_tokens or 0
        output = usage.completion_tokens_details or usage.output_tokens_details
        self.num_reasoning_tokens += 0 if output is None else output.reasoning_tokens or 0

    def usage(self) -> dict[str, Any]:
        """Return the tokens in the format of OpenAI's batches."""
        return {
            "input_tokens": self.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "output_tokens": self.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
        }
