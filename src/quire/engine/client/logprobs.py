"""Log-probabilities of generated tokens and of prompts, as users see them.

In: the `Candidates` of a position, from the core. Out: `Logprob`s by token id.
"""

from quire.base.plan import Candidates
from quire.base.requests.outputs import Logprob
from quire.render.tokens.token_stream import TokenStream


def logprobs_of(
    candidates: Candidates,
    num_requested: int,
    stream: TokenStream | None,
    is_ranked: bool = True,
) -> dict[int, Logprob]:
    """Return Logprobs by token id: the chosen token first, then the most probable ones by rank.

    num_wanted: how many besides the chosen one; -1 is all. stream: text stream just before this
    position; None without a tokenizer. A token that completes a character shows it; a token that
    is only a part of a character shows nothing. is_ranked: whether the candidates are the most
    probable tokens; the ranks of tokens requested by id are unknown.
    """
    stop = None if num_requested < 0 else 1 + num_requested
    token_ids = candidates.token_ids[:stop].tolist()
    logprobs = candidates.logprobs[:stop].tolist()
    found: dict[int, Logprob] = {}
    for place, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        if token_id in found:
            continue  # the chosen token is one of the most probable
        rank = candidates.rank if place == 0 else place if is_ranked else None
        found[token_id] = Logprob(logprob, rank, stream.peek(token_id) if stream else None)
    return found


class PromptLogprobCollector:
    """Log-probabilities of a prompt, which may come in several parts. The first token has none."""

    __slots__ = ("_first", "_is_ranked", "_prompt", "_stream", "_num_requested", "logprobs")

    def __init__(
        self,
        prompt: list[int],
        num_requested: int,
        stream: TokenStream | None,
        named_from: int | None = None,
    ) -> None:
        """Create the collector. stream: text stream at the start of the prompt, with special
        tokens shown; None without text.
        named_from: last position without candidates, if the request names the tokens of each
        position."""
        self._prompt = prompt
        self._num_requested = num_requested
        self._stream = stream
        self._is_ranked, self._first = named_from is None, (named_from or 0) + 1
        self.logprobs: list[dict[int, Logprob] | None] = [None]
        self._advance(0)

    def extend(self, part: list[Candidates]) -> None:
        """Add the next positions in order; positions after the prompt are ignored."""
        for candidates in part:
            place = len(self.logprobs)
            if place == len(self._prompt):
                return
            found = None
            if place >= self._first:
                found = logprobs_of(candidates, self._num_requested, self._stream, self._is_ranked)
            self.logprobs.append(found)
            self._advance(place)

    def _advance(self, place: int) -> None:
        if self._stream is not None:
            self._stream.push(self._prompt[place])
