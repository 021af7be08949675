"""Parts of a JSON setting as separate flags, as in vLLM.

--speculative-config.method ngram --speculative-config.num-speculative-tokens 3
->  --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from quire.base.errors import ConfigError

PART = re.compile(r"--([a-z][a-z-]*)((?:\.[\w-]+)+)(?:=(.*))?", re.DOTALL)
Json = dict[str, Any]


def join_parts(words: Sequence[str], names: Collection[str], known: Collection[str]) -> list[str]:
    """Merge the parts of each setting into one JSON flag at the end.

    A part overrides the same part of the setting's own JSON.
    names: settings with parts, with underscores.
    known: flags that only look like parts.
    Raises ConfigError for a part without a value."""
    found: dict[str, Json] = {}
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        part = None if word in known else PART.fullmatch(word)
        name = "" if part is None else part[1].replace("-", "_")
        if part is None or name not in names:
            kept.append(word)
            kept += [*rest] if word == "--" else []
            continue
        keys = [key.replace("-", "_") for key in part[2][1:].split(".")]
        _put(found.setdefault(name, {}), keys, _value(word, part[3], rest))
    for name, parts in found.items():
        flag = "--" + name.replace("_", "-")
        whole = json.dumps(_merged(_given(kept, flag), parts))
        kept = [*_up_to_dashes(kept), flag, whole, *_from_dashes(kept)]
    return kept


def _up_to_dashes(words: list[str]) -> list[str]:
    return words[: words.index("--")] if "--" in words else words


def _from_dashes(words: list[str]) -> list[str]:
    return words[words.index("--") :] if "--" in words else []


def _value(word: str, given: str | None, rest: Iterator[str]) -> Any:
    """Return the value of a part: parsed JSON, or the text if it is not JSON."""
    text = next(rest, None) if given is None else given
    if text is None:
        raise ConfigError(f"{word} needs a value, such as {word} VALUE.")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _put(found: Json, keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        inner = found.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(
                f"{'.'.join(keys)} is a part of {key}, which is set to {inner!r}; remove one."
            )
        found = inner
    found[keys[-1]] = value


def _given(words: list[str], flag: str) -> Json:
    """Return the JSON of the setting's own flag; {} for invalid JSON, which is checked later."""
    texts = [words[i + 1] for i, word in enumerate(words[:-1]) if word == flag]
    texts += [word[len(flag) + 1 :] for word in words if word.startswith(flag + "=")]
    try:
        found = json.loads(texts[-1]) if texts else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _merged(one: Json, other: Json) -> Json:
    for name, value in other.items():
        mine = one.get(name)
        is_part = isinstance(value, dict) and isinstance(mine, dict)
        one = one | {name: _merged(mine or {}, value) if is_part else value}
    return one
