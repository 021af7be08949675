"""`IncrementalDetokenizer`: converts the tokens of one sequence to text, while they arrive.

Token ids pass through a token stream (whole characters only) and through the stop strings. The cost
is linear in the number of tokens.

Invariants of stop strings:
- Text is held back only while it may begin a stop string.
- Released text contains no stop string that counts.
- The place of the cut does not depend on the pieces in which the text arrives.
- The stop string that ends first wins; of two with the same end, the one listed first.
"""

from collections.abc import Iterable, Sequence

from quire.base.requests.sampling_params import SamplingParams
from quire.render.tokens.pieces import PieceStream
from quire.render.tokens.token_stream import TokenStream, WindowStream
from quire.render.tokens.tokenizer import Tokenizer


class StopStrings:
    """Search a text for stop strings. `matched` is the one found; push nothing after a match."""

    __slots__ = ("_floor", "_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._held = ""
        self._floor = 0  # index in the held text after which a stop string must end
        self.matched: str | None = None

    def push(self, text: str, counts: bool = True) -> str:
        """Return the text to release. counts: whether a stop string that ends in `text` stops."""
        text = self._held + text
        if counts:
            place = self._search(text)
            if place >= 0:
                self._held = ""
                return text[:place]
        else:
            self._floor = len(text)
        keep = self._beginning(text)
        self._held = text[keep:]
        self._floor = max(0, self._floor - keep)
        return text[:keep]

    def flush(self) -> str:
        """Return the held text, when no more text follows."""
        held, self._held = self._held, ""
        return held

    def _search(self, text: str) -> int:
        """Return the index at which to cut the text; -1 without a stop string."""
        best_end, cut = len(text) + 1, -1
        for stop in self._stops:
            at = text.find(stop, max(0, self._floor - len(stop) + 1))
            end = at + len(stop)
            if at >= 0 and end < best_end:
                best_end, cut = end, end if self._include else at
                self.matched = stop
        return cut

    def _beginning(self, text: str) -> int:
        """Return the start of the longest end of the text that may begin a stop string."""
        keep = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < keep:
                if stop.startswith(text[at:]):
                    keep = at
                at = text.find(stop[0], at + 1)
        return keep


class IncrementalDetokenizer:
    """Detokenizes one sequence.

    num_tokens: number of tokens so far, without tokens after a stop string.
    stop_string: the stop string that ended the text; later tokens are ignored.
    """

    __slots__ = ("_min_tokens", "_stops", "num_tokens", "stream")

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams | None = None,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        """Open the stream. The text continues `prompt_token_ids`; without them it starts a text."""
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
        """Return the text that one more token releases. A hidden token counts, but has no text."""
        stops = self._stops
        if stops is not None and stops.matched is not None:
            return ""
        self.num_tokens += 1
        text = "" if hidden else self.stream.push(token_id)
        if stops is None or not text:
            return text
        return stops.push(text, self.num_tokens > self._min_tokens)

    def update(self, token_ids: Sequence[int]) -> str:
        """Push several tokens and return the text that they release."""
        return "".join([self.push(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """Return the rest when no token follows: held text and an unfinished character."""
        stops = self._stops
        if stops is None:
            return self.stream.flush()
        if stops.matched is not None:
            return ""
        text = stops.push(self.stream.flush(), counts=False)
        return text + stops.flush()


def open_stream(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int] = (),
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
    shown_special_ids: Iterable[int] = (),
) -> TokenStream:
    """Return a stream that continues the prompt; by table if the decoder allows, else by window.

    shown_special_ids: special tokens that are not skipped."""
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
    skipped = skipped.difference(shown_special_ids)
    if tokenizer.pieces is not None:
        return PieceStream(tokenizer.pieces, skipped, prompt_token_ids)
    glue = skip_special_tokens or spaces_between_special_tokens
    return WindowStream(tokenizer, skipped, prompt_token_ids, glue)
