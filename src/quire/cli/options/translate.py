"""Replace flags of other engines on the command line by quire's, or explain the alternative."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from quire.base.errors import ConfigError
from quire.cli.options.synonyms import SYNONYMS, Spellings


@dataclass
class _Taken:
    """Replacements so far. `words` maps quire's flag to the original flag and the new words."""

    words: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, flag: str, words: tuple[str, ...]) -> None:
        """Record a replacement. Raises ConfigError if it contradicts an earlier one."""
        if not words:
            return
        earlier, before = self.words.setdefault(words[0], (flag, words))
        if before != words:
            raise ConfigError(
                f"{earlier} and {flag} both set {words[0]}, to {_value(before)} and"
                f" {_value(words)}; give {words[0]} once."
            )


def translate(
    words: Sequence[str], known: Collection[str], command: str
) -> tuple[list[str], list[str]]:
    """Return the words of a command line with quire's flags, and notes on ignored flags.

    known: flags of the command. command: its name in errors. Raises ConfigError with the table's
    advice for a flag without counterpart.
    """
    taken, found = _Taken(), list[str]()
    rest = iter(words)
    for word in rest:
        if word == "--":
            return [*found, word, *rest], taken.notes
        flag, equals, value = word.partition("=")
        each = SYNONYMS.get(flag)
        if each is None or flag in known:
            found.append(word)
            continue
        found += _replaced(each, flag, value if equals else None, rest, taken)
        _check_known(each, flag, known, command)
    return found, taken.notes


def _replaced(
    each: Spellings, flag: str, given: str | None, rest: Iterator[str], taken: _Taken
) -> tuple[str, ...]:
    """Return the replacement of a flag and its value. given: the value, if part of the word."""
    meaning = each.meaning
    if not (meaning.becomes or meaning.values or meaning.ignored):
        raise ConfigError(f"{flag} is not a flag of quire: {meaning.advice}.")
    value = None
    if not meaning.is_switch:
        value = next(rest, None) if given is None else given
        if value is None:
            raise ConfigError(f"{flag} needs a value.")
    if value is not None and value in meaning.values:
        taken.add(flag, meaning.values[value])
        return meaning.values[value]
    if not meaning.others:
        raise ConfigError(f"{flag} {value} is not supported: {meaning.advice}.")
    if meaning.ignored:
        taken.notes.append(f"{flag} is ignored: {meaning.ignored}.")
        return ()
    words = meaning.becomes if value is None else (*meaning.becomes, value)
    taken.add(flag, words)
    return words


def _check_known(each: Spellings, flag: str, known: Collection[str], command: str) -> None:
    """Raise ConfigError if the command lacks the replacement of a flag."""
    for ours in each.meaning.becomes[:1]:
        if ours not in known:
            raise ConfigError(f"{flag} stands for {ours}, which `{command}` does not take.")


def _value(words: tuple[str, ...]) -> str:
    return " ".join(words[1:]) or "on"
