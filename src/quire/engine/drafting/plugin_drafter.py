"""Draft tokens of a class of a package or a file (docs/extend/drafters.md).

A sequence has one object of the class. It gets the sequence's tokens and proposes the next ones. A
class that raises, or returns no list of tokens, proposes nothing more for that sequence.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from quire.base.errors import ConfigError
from quire.base.plugins import DRAFTERS, load_plugin, short_name
from quire.base.settings.speculation import FIELDS_OF, Speculation

logger = logging.getLogger("quire")


class History(Protocol):
    """Tokens of one sequence, from which draft tokens follow. num_taken: tokens received."""

    num_taken: int

    def extend(self, token_ids: list[int]) -> None:
        """Add the sequence's next tokens."""
        ...

    def propose(self, num: int) -> list[int]:
        """Return at most `num` draft tokens after the last token."""
        ...


class PluginDrafters:
    """Maker of a plug-in's drafters, one for each sequence. Raises ConfigError for a class that
    cannot be used."""

    def __init__(self, speculation: Speculation, vocab_size: int) -> None:
        self.name, self.vocab_size = short_name(speculation.method), vocab_size
        self.has_failed = False
        self._class = load_plugin(DRAFTERS, speculation.method, FIELDS_OF)
        try:
            self._class()
        except Exception as error:
            raise ConfigError(
                f"the drafter {self.name!r} cannot be created: {type(error).__name__}: {error}."
            ) from error

    def history(self) -> History:
        """Return the drafter of a new sequence; one without drafts if its creation fails."""
        history = _PluginHistory(self)
        history.create(self._class)
        return history


class _PluginHistory:
    """One sequence's object of a plug-in. Its faults end its drafts, not the request."""

    _drafter: History

    def __init__(self, drafters: PluginDrafters) -> None:
        self.num_taken = 0
        self._drafters = drafters
        self._is_faulty = False

    def create(self, kind: Callable[[], History]) -> None:
        try:
            self._drafter = kind()
        except Exception as error:
            self._fail(error)

    def extend(self, token_ids: list[int]) -> None:
        self.num_taken += len(token_ids)
        if token_ids and not self._is_faulty:
            try:
                self._drafter.extend(token_ids)
            except Exception as error:
                self._fail(error)

    def propose(self, num: int) -> list[int]:
        if self._is_faulty:
            return []
        try:
            found = [int(token) for token in self._drafter.propose(num)][:num]
        except Exception as error:
            self._fail(error)
            return []
        size = self._drafters.vocab_size
        known = next((i for i, token in enumerate(found) if not 0 <= token < size), len(found))
        return found[:known]

    def _fail(self, error: Exception) -> None:
        self._is_faulty = True
        if not self._drafters.has_failed:
            self._drafters.has_failed = True
            logger.error(
                "the drafter %r failed; its sequences continue without drafts",
                self._drafters.name, exc_info=error,
            )  # fmt: skip
