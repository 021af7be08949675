"""Settings files of other programs: values are set in them, shown before, and taken back.

A `SettingsFile` computes the text with its values. `Change` writes it, and keeps a private record
of the texts before and after. `revert` uses the record: a file that has not changed since gets its
old bytes back. In a file that has changed, only the values that still stand are taken back.
"""

import contextlib
import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from quire.base.errors import ConfigError
from quire.base.files import replace_file, user_cache

MAX_BYTES = 4 << 20  # of a settings file
# A secret's name, and its value up to the quote or the line's end.
SECRET = re.compile(
    r"""(?i)((?:key|token|secret|password)["']?[ \t]*[:=][ \t]*)"""
    r"""("(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^"'\s\[{][^\n]*)"""
)


class SettingsFile(Protocol):
    """A file with values to set."""

    @property
    def path(self) -> Path: ...

    def with_values(self, text: str | None) -> str:
        """Return the file's text with the values. text: None if there is no file. Raises
        ConfigError if the text cannot be changed safely."""
        ...

    def without_values(self, text: str, before: str | None, after: str) -> str | None:
        """Return the text without the values in which `after` differs from `before`; None removes
        the file. Raises ConfigError if the text cannot be changed safely."""
        ...


@dataclass(frozen=True)
class JsonFile:
    """A JSON object. values: what to set, by name, in nested objects."""

    path: Path
    values: Mapping[str, Any] = field(default_factory=dict)

    def with_values(self, text: str | None) -> str:
        """See SettingsFile."""
        found = self._parsed(text) if text and text.strip() else {}
        _merge(found, self.values)
        return _written(found)

    def without_values(self, text: str, before: str | None, after: str) -> str | None:
        """See SettingsFile."""
        found = self._parsed(text)
        _take_back(found, self._parsed(before) if before else {}, self._parsed(after))
        return _written(found) if found or before is not None else None

    def _parsed(self, text: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ConfigError(
                f"{self.path} is not plain JSON ({error}), so it is not changed. Set these values"
                f" by hand:\n{_written(dict(self.values))}"
            ) from error
        if not isinstance(found, dict):
            raise ConfigError(f"{self.path} holds no JSON object, so it is not changed.")
        return found


@dataclass(frozen=True)
class YamlFile:
    """A YAML mapping, changed by whole lines so that its comments stay. values: texts to set at the
    top level."""

    path: Path
    values: Mapping[str, str] = field(default_factory=dict)

    def with_values(self, text: str | None) -> str:
        """See SettingsFile."""
        lines = (text or "").splitlines()
        self._check(text or "")
        for name, value in self.values.items():
            line, at = f"{name}: {json.dumps(value)}", self._line_of(lines, name)
            if at is None:
                lines.append(line)
            else:
                lines[at] = line
        return "\n".join(lines) + "\n"

    def without_values(self, text: str, before: str | None, after: str) -> str | None:
        """See SettingsFile."""
        lines, old = text.splitlines(), (before or "").splitlines()
        for line in after.splitlines():
            if line in old or line not in lines:
                continue
            at_before = self._line_of(old, line.partition(":")[0])
            at = lines.index(line)
            lines[at : at + 1] = [] if at_before is None else [old[at_before]]
        return "\n".join(lines) + "\n" if lines or before is not None else None

    def _line_of(self, lines: list[str], name: str) -> int | None:
        found = [i for i, line in enumerate(lines) if re.match(rf"{re.escape(name)}\s*:", line)]
        return found[0] if found else None

    def _check(self, text: str) -> None:
        """Raise ConfigError unless each of the names is absent or has a text on its own line."""
        import yaml  # type: ignore[import-untyped]  # imported only if needed

        try:
            found = yaml.safe_load(text) or {}
        except yaml.YAMLError as error:
            raise ConfigError(f"{self.path} is not valid YAML: {error}") from error
        is_plain = isinstance(found, dict) and all(
            isinstance(found.get(name, ""), str | None) for name in self.values
        )
        lines = text.splitlines()
        is_found = is_plain and all(
            self._line_of(lines, name) is not None for name in self.values if name in found
        )
        if not is_found or "\n---" in text:
            names = ", ".join(self.values)
            raise ConfigError(f"{self.path} is not changed; set {names} there by hand.")


@dataclass(frozen=True)
class OwnFile:
    """A whole file of ours."""

    path: Path
    text: str = ""

    def with_values(self, text: str | None) -> str:
        """See SettingsFile."""
        return self.text

    def without_values(self, text: str, before: str | None, after: str) -> str | None:
        """See SettingsFile."""
        raise ConfigError(f"{self.path} was changed since; remove or keep it by hand.")


@dataclass(frozen=True)
class Change:
    """Values that are to be set in a file. before: the text without them; None if there was no
    file."""

    settings: SettingsFile
    now: str | None
    before: str | None
    after: str

    @property
    def is_done(self) -> bool:
        return self.now == self.after

    def shown(self) -> str:
        """Return the difference that writing makes, with secrets masked."""
        path = str(self.settings.path)
        lines = difflib.unified_diff(
            _masked(self.now or "").splitlines(),
            _masked(self.after).splitlines(),
            path if self.now is not None else "(no file)", path, lineterm="", n=1,
        )  # fmt: skip
        return "\n".join(lines)

    def write(self, name: str) -> None:
        """Write the file, after a record for `revert`. name: of the program. Raises ConfigError."""
        record = _record(name)
        kind, path = type(self.settings).__name__, str(self.settings.path)
        kept = asdict(_Record(kind, path, self.before, self.after))
        try:
            record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(record, json.dumps(kept), 0o600)
            self.settings.path.parent.mkdir(parents=True, exist_ok=True)
            _replace(self.settings.path, self.after, _mode(self.settings.path))
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be written: {error.strerror}.") from error


KINDS = {kind.__name__: kind for kind in (JsonFile, YamlFile, OwnFile)}


@dataclass(frozen=True)
class _Record:
    kind: str
    path: str
    before: str | None
    after: str


def change(settings: SettingsFile, name: str) -> Change:
    """Plan to set values. name: of the program. Raises ConfigError if the file cannot be read or
    changed safely."""
    now, record = _read(settings.path), _find(name)
    before = now
    if record is not None and now is not None and record.path == str(settings.path):
        # A second launch replaces the values of the first one, also if the file was edited since.
        with contextlib.suppress(ConfigError):
            before = _reverted(settings, now, record)
    if now is not None and settings.with_values(now) == now:
        return Change(settings, now, before, now)
    return Change(settings, now, before, settings.with_values(before))


def revert(name: str) -> str | None:
    """Take back the values that were set last, and return the file's path; None if there are none.
    Raises ConfigError."""
    record = _find(name)
    if record is None:
        return None
    path = Path(record.path)
    now = _read(path)
    text = record.before if now is None else _reverted(KINDS[record.kind](path), now, record)
    try:
        if text is None:
            path.unlink(missing_ok=True)
        elif now is not None:
            _replace(path, text, _mode(path))
        _record(name).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
    return record.path


def _reverted(settings: SettingsFile, now: str, record: _Record) -> str | None:
    """Return the text without the values of the last change; None for no file."""
    if now == record.after:
        return record.before
    return settings.without_values(now, record.before, record.after)


def _record(name: str) -> Path:
    return user_cache("launch") / f"{name}.json"


def _find(name: str) -> _Record | None:
    """Return the record of the last change."""
    text = _read(_record(name))
    try:
        found = _Record(**json.loads(text or "null"))
    except (ValueError, TypeError):
        return None
    return found if found.kind in KINDS else None


def _read(path: Path) -> str | None:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_BYTES >> 20} MiB, so it is not changed.")
        return path.read_text("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error


def _replace(path: Path, text: str, mode: int) -> None:
    path = path.resolve()  # a link stays a link
    replace_file(path, text.encode(), path.with_name(f".{path.name}.{os.getpid()}.tmp"), mode)


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777 if path.exists() else 0o600


def _masked(text: str) -> str:
    return SECRET.sub(r"\1***", text)


def _written(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping):
            inner = into.get(name)
            into[name] = inner if isinstance(inner, dict) else {}
            _merge(into[name], value)
        else:
            into[name] = value


def _take_back(found: dict[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Give each value that differs between before and after, and still stands, its value of before.
    Remove the values that were not there."""
    for name, value in after.items():
        old, now = before.get(name), found.get(name)
        if value == old or name not in found:
            continue
        if isinstance(value, dict) and isinstance(now, dict):
            _take_back(now, old if isinstance(old, dict) else {}, value)
            if not now and name not in before:
                del found[name]
        elif now == value and name in before:
            found[name] = old
        elif now == value:
            del found[name]
