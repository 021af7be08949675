"""Read typed values from a model's JSON files, which anybody may have written.

A value is of the type and in the range that is requested, or an error names the field, the value
and what it may be. `null` stands for an absent field. No size or nesting is trusted.
"""

import json
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire.base.errors import ModelError

MAX_SIZE = 1 << 24  # of a matrix's side, a vocabulary apart
MAX_NUMBER = 1e30  # so that products of two are finite
MAX_COUNT = (1 << 31) - 1  # of what has numbers in int32: positions, token ids


class Fields:
    """The values of one dictionary. where: what errors call it, such as `config.json`. defaults:
    of fields that are not there; one that is null stays absent."""

    def __init__(
        self,
        raw: Mapping[str, Any],
        where: str = "config.json",
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._raw, self._where, self._defaults = raw, where, defaults

    def has(self, name: str) -> bool:
        return self.value(name) is not None

    def is_null(self, name: str) -> bool:
        """Tell whether it is there and null: for the few fields where that is not the default."""
        return name in self._raw and self._raw[name] is None

    def value(self, name: str) -> Any:
        """Return it as it stands there; None if absent."""
        return self._raw.get(name, self._defaults.get(name))

    def integer(
        self, *names: str, default: int | None = None, least: int = 1, most: int = MAX_SIZE
    ) -> int:
        """Return the first of the names that is there. Raises ModelError if none is and there is no
        default, for what is no whole number, and for one out of the range; so do the others."""
        name = self._present(names, default is not None)
        if name is None:
            assert default is not None
            return default
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(name, f"it must be a whole number from {least} to {most}")
        return value

    def number(
        self, name: str, default: float | None = None, least: float = 0.0, above: bool = True
    ) -> float:
        """Return a number above `least`, or not below it, and not above 1e30."""
        if self._present((name,), default is not None) is None:
            assert default is not None
            return default
        value = self.value(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # In this order, which refuses NaN as well.
        if not is_number or not least <= value <= MAX_NUMBER or (above and value == least):
            limit = f"above {least:g}" if above else f"from {least:g}"
            raise self.error(name, f"it must be a number {limit} to {MAX_NUMBER:g}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "it must be true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(name, "it must be a text")
        return value

    def integers(self, name: str, most: int = MAX_COUNT) -> tuple[int, ...]:
        """Return a list of whole numbers from 0, or a single one; empty if absent."""
        value = self.value(name)
        found = value if isinstance(value, list) else [] if value is None else [value]
        for each in found:
            if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each <= most:
                raise self.error(name, f"it must hold whole numbers from 0 to {most}")
        return tuple(found)

    def texts(self, name: str) -> tuple[str, ...] | None:
        """Return a list of texts; None if absent."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.error(name, "it must be a list of texts")
        return tuple(value)

    def inner(self, name: str) -> "Fields | None":
        """Return a dictionary in this one; None if it is absent or empty."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "it must be an object with fields of its own")
        return Fields(value, f"{self._where}: {name}") if value else None

    def names(self) -> list[str]:
        return list(self._raw)

    def error(self, name: str, what: str) -> ModelError:
        """Return the error to raise: it names the field and its value, and says `what` about it."""
        return ModelError(f"{self._where}: {name} is {shown(self.value(name))}; {what}.")

    def _present(self, names: tuple[str, ...], has_default: bool) -> str | None:
        for name in names:
            if self.value(name) is not None:
                return name
        if has_default:
            return None
        which = f"no {names[0]}" if len(names) == 1 else f"none of the fields {', '.join(names)}"
        raise ModelError(f"{self._where} has {which}.")


def shown(value: Any) -> str:
    """Return a value as errors show it: as JSON would, and not long."""
    plain: dict[Any, str] = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return plain[value]
    return reprlib.repr(value)


MAX_JSON_BYTES, MAX_NESTING = 1 << 26, 32
# transformers writes numbers that JSON does not have as {"__float__": "Infinity"}.
FLOAT = "__float__"
FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a file. Raises FileNotFoundError, and ModelError for what is none, for
    more than 64 MiB, and for lists and objects within more than 31 others."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_JSON_BYTES + 1)
        if len(text) > MAX_JSON_BYTES:
            raise ValueError(f"it has more than {MAX_JSON_BYTES:,} bytes")
        value = json.loads(text)
        _check_nesting(value, MAX_NESTING)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
    except RecursionError as error:
        raise ModelError(
            f"{path} is nested too deeply, {MAX_NESTING} levels at most; fetch the file again."
        ) from error
    except ValueError as error:  # no JSON, other bytes than UTF-8, numbers of thousands of digits
        raise ModelError(f"{path} is not valid JSON ({error}); fetch the file again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value


def with_floats(value: Any) -> Any:
    """Return a value of a file with numbers in the place of the objects that stand for them. A list
    that holds such a number is one of floats: its 0 becomes 0.0, as transformers demands."""
    if isinstance(value, list):
        found = [with_floats(each) for each in value]
        if not any(isinstance(each, float) and not math.isfinite(each) for each in found):
            return found
        return [float(each) if type(each) is int else each for each in found]
    if not isinstance(value, dict):
        return value
    name = value.get(FLOAT)
    if len(value) == 1 and isinstance(name, str) and name in FLOATS:
        return FLOATS[name]
    return {key: with_floats(each) for key, each in value.items()}


def _check_nesting(value: Any, levels: int) -> None:
    if isinstance(value, dict | list):
        if levels == 0:
            raise RecursionError
        for each in value.values() if isinstance(value, dict) else value:
            _check_nesting(each, levels - 1)
