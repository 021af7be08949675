"""Finds stop strings in text that arrives in pieces, and holds back what may begin one.

Invariants: text is held back only while it is the beginning of a stop string; what is given out
never holds a stop string that counts; where the text is cut does not depend on the pieces.
The stop string whose end comes first wins; of two that end together, the one named first.
"""

from collections.abc import Sequence


class StopStrings:
    """matched: the stop string that was found; nothing may be pushed after that."""

    __slots__ = ("_floor", "_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._held = ""
        self._floor = 0  # a stop string must end behind this place in the held text
        self.matched: str | None = None

    def push(self, text: str, counts: bool = True) -> str:
        """New text to give out. counts: whether a stop string that ends in `text` stops."""
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
        """Return what was held back, when nothing follows any more."""
        held, self._held = self._held, ""
        return held

    def _search(self, text: str) -> int:
        """Return where to cut the text; -1 if no stop string ends in it."""
        best_end, cut = len(text) + 1, -1
        for stop in self._stops:
            at = text.find(stop, max(0, self._floor - len(stop) + 1))
            end = at + len(stop)
            if at >= 0 and end < best_end:
                best_end, cut = end, end if self._include else at
                self.matched = stop
        return cut

    def _beginning(self, text: str) -> int:
        """Return where the longest end of the text begins that is the beginning of a stop
        string."""
        keep = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < keep:
                if stop.startswith(text[at:]):
                    keep = at
                at = text.find(stop[0], at + 1)
        return keep
