"""Compile texts of grammars to matchers, which are cached for other requests with the same text."""

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from quire.base.errors import GRAMMAR_FAULT, QuireError
from quire.engine.grammars.vocabulary import MakeVocabulary, Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_CACHED_GRAMMARS = 32  # compiled grammars in the cache
MAX_LEXER_STATES = 50_000  # of one compiled grammar: some 20 MB


class Compiler:
    """Cache of compiled grammars, for any thread. vocabulary: None before the first grammar."""

    def __init__(self, make_vocabulary: MakeVocabulary) -> None:
        self.vocabulary: Vocabulary | None = None
        self._make_vocabulary = make_vocabulary
        self._cache: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: str, instead_of: "LLMatcher | None" = None) -> "LLMatcher":
        """Return a shared matcher, which callers must copy instead of changing it. instead_of: a
        matcher that is used up, so it is not returned. Raises BadGrammar, ConfigError,
        MissingDependency."""
        if self.vocabulary is None:
            self.vocabulary = self._make_vocabulary()
        with self._lock:
            found = self._cache.get(grammar)
        if found is None or found is instead_of:
            found = compiled(self.vocabulary, grammar)
        with self._lock:
            self._cache[grammar] = found
            self._cache.move_to_end(grammar)
            if len(self._cache) > MAX_CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        return found


class BadGrammar(Exception):
    """Error of llguidance about a grammar."""


# Limits of llguidance that depend on the text, not only on the grammar: error text and name.
LIMITS = {
    "Current row has": "max_items_in_row",
    "Too many items": "step_max_items",
    "too many expressions": "step_lexer_fuel",
    "too many states": "max_lexer_states",
}
# Every matcher meets these limits again with the same text. The lexer's limits count what copies of
# a matcher share, so another matcher may continue.
LIMITS_OF_TEXTS = ("max_items_in_row", "step_max_items")


def compiled(vocabulary: Vocabulary, grammar: str) -> "LLMatcher":
    """Return a new matcher that has computed its first mask. Raises BadGrammar."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=limits)
    check(matcher)
    matcher.compute_bitmask()  # copies share its results
    check(matcher)
    return matcher


def check(matcher: "LLMatcher") -> None:
    """Raise BadGrammar if a matcher is in error."""
    if matcher.is_error():
        raise BadGrammar(matcher.get_error().partition("\n<")[0])  # without its inner state


def is_final(matcher: "LLMatcher") -> bool:
    """Return whether a matcher met a limit that any other would meet with the same text. Matching
    that text again may take half a minute, while the step waits."""
    message = matcher.get_error() if matcher.is_error() else ""
    return any(words in message and name in LIMITS_OF_TEXTS for words, name in LIMITS.items())


def in_words(error: BaseException) -> str:
    """Return the error message for the request."""
    if isinstance(error, QuireError):
        return str(error)
    if not isinstance(error, BadGrammar):
        return f"this request's grammar failed: {type(error).__name__}: {error}"
    reason = str(error)
    for message, limit in LIMITS.items():
        if message in reason:
            reason = f"it meets llguidance's limit {limit} ({reason}); make it less ambiguous"
    return f"{GRAMMAR_FAULT}: {reason}"
