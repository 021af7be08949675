"""`IncrementalDetokenizer`: the tokens of one continuation, as they come, to the text to show.

Token ids go through a token stream (whole characters only) and through the stop strings (nothing
that may turn out to be one). The cost is linear in the number of tokens.
"""

from collections.abc import Sequence

from quire.base.sampling_params import SamplingParams
from quire.render.stop_strings import StopStrings
from quire.render.token_stream import open_stream
from quire.render.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """num_tokens: how many tokens count so far; one after a stop string does not.

    stop_string: the stop string that ended the text; tokens that come after it are ignored.
    """

    __slots__ = ("_min_tokens", "_stops", "num_tokens", "stream")

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams | None = None,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        """prompt_token_ids: what the text continues; leave it out to decode ids on their own."""
        params = params or SamplingParams()
        self.stream = open_stream(
            tokenizer,
            prompt_token_ids,
            params.skip_special_tokens,
            params.spaces_between_special_tokens,
            params.shown_special_token_ids or (),
        )
        self.num_tokens = 0
        self._min_tokens = params.min_tokens
        stops = params.stop_strings
        self._stops = StopStrings(stops, params.include_stop_str_in_output) if stops else None

    @property
    def stop_string(self) -> str | None:
        return None if self._stops is None else self._stops.matched

    def push(self, token_id: int, hidden: bool = False) -> str:
        """New text to show after one more token. hidden: the token counts, but has no text."""
        stops = self._stops
        if stops is not None and stops.matched is not None:
            return ""
        self.num_tokens += 1
        text = "" if hidden else self.stream.push(token_id)
        if stops is None or not text:
            return text
        return stops.push(text, self.num_tokens > self._min_tokens)

    def update(self, token_ids: Sequence[int]) -> str:
        """`push` several tokens."""
        return "".join([self.push(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """Return the rest, when no token follows: text held back and an unfinished character."""
        stops = self._stops
        if stops is None:
            return self.stream.flush()
        if stops.matched is not None:
            return ""
        text = stops.push(self.stream.flush(), counts=False)
        return text + stops.flush()
