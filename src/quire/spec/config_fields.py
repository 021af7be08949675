"""Read typed values from a model's JSON files, which are untrusted.

Each value has the requested type and range, or an error names the field, the value and the valid
values. `null` means that a field is absent. Sizes and nesting are limited.
"""

import json
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire.base.errors import ModelError

MAX_SIZE = 1 << 24  # limit for a matrix's side, except a vocabulary
MAX_NUMBER = 1e30  # limit that keeps the product of two numbers finite
MAX_COUNT = (1 << 31) - 1  # limit for values that int32 must hold: positions, token ids


class Fields:
    """The values of one dictionary.

    where: the dictionary's name in errors, such as `config.json`.
    defaults: values of absent fields; a field that is null stays absent."""

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
        """Return whether the field is null, for fields where null does not mean the default."""
        return name in self._raw and self._raw[name] is None

    def value(self, name: str) -> Any:
        """Return the raw value; None if the field is absent."""
        return self._raw.get(name, self._defaults.get(name))

    def integer(
        self, *names: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_SIZE
    ) -> int:
        """Return the value of the first name that is present.

        Raises ModelError if the value is not a whole number in the range, or if no name is present
        and there is no default. The other readers do likewise."""
        name = self._present(names, default is not None)
        if name is None:
            assert default is not None
            return default
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.error(name, f"it must be a whole number from {minimum} to {maximum}")
        return value

    def number(
        self, name: str, default: float | None = None, minimum: float = 0.0, above: bool = True
    ) -> float:
        """Return a number from `minimum` to 1e30, without `minimum` itself if `above` is set."""
        if self._present((name,), default is not None) is None:
            assert default is not None
            return default
        value = self.value(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # This order of comparisons also rejects NaN.
        if not is_number or not minimum <= value <= MAX_NUMBER or (above and value == minimum):
            limit = f"above {minimum:g}" if above else f"from {minimum:g}"
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

    def integers(self, name: str, maximum: int = MAX_COUNT) -> tuple[int, ...]:
        """Return a list of whole numbers from 0 to `maximum`, or of a single one; empty if
        absent."""
        value = self.value(name)
        found = value if isinstance(value, list) else [] if value is None else [value]
        for each in found:
            if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each <= maximum:
                raise self.error(name, f"it must hold whole numbers from 0 to {maximum}")
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

    def error(self, name: str, problem: str) -> ModelError:
        """Return an error that names the field and its value; `problem` completes the sentence."""
        return ModelError(f"{self._where}: {name} is {shown(self.value(name))}; {problem}.")

    def _present(self, names: tuple[str, ...], has_default: bool) -> str | None:
        for name in names:
            if self.value(name) is not None:
                return name
        if has_default:
            return None
        which = f"no {names[0]}" if len(names) == 1 else f"none of the fields {', '.join(names)}"
        raise ModelError(f"{self._where} has {which}.")


def shown(value: Any) -> str:
    """Return a value in JSON's notation, shortened for an error."""
    plain: dict[Any, str] = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return plain[value]
    return reprlib.repr(value)


MAX_JSON_BYTES, MAX_NESTING = 1 << 26, 32
# transformers writes numbers that JSON does not have as {"__float__": "Infinity"}.
FLOAT = "__float__"
FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises FileNotFoundError if there is no file.

    Raises ModelError for other JSON, more than 64 MiB, or more than 31 levels of nesting."""
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
    except ValueError as error:  # not JSON, not UTF-8, or a number with thousands of digits
        raise ModelError(f"{path} is not valid JSON ({error}); fetch the file again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value


def with_floats(value: Any) -> Any:
    """Return a file's value with numbers in place of objects such as {"__float__": "NaN"}.

    A list with such a number becomes a list of floats (0 becomes 0.0), as transformers requires."""
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
