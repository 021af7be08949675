"""Reads a model's JSON files, which anybody may have written: no size or nesting is trusted."""

import json
import math
from pathlib import Path
from typing import Any

from quire.base.errors import ModelError

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
