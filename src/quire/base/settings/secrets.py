"""Settings with secrets: texts that mask themselves wherever they are shown.

A `Secret` compares, hashes and encodes as its true text, and its methods (`partition`, `encode`)
use the true text. `str()`, `repr()`, `%` and f-strings show it masked, so logs, errors and metrics
cannot leak it by accident. msgspec refuses to encode it without the hook `reveal_secret`, which is
only for child processes of this server.

    >>> store = SecretUrl("redis://user:hunter2@cache:6379/0")
    >>> f"{store}"
    'redis://user:***@cache:6379/0'
    >>> store.reveal()
    'redis://user:hunter2@cache:6379/0'
"""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Self
from urllib.parse import unquote

MASK = "***"
KEY_VARIABLES = ("QUIRE_API_KEY", "VLLM_API_KEY")  # environment variables that hold an API key
# Schemes of addresses whose only secrets are before an @ and in the query.
KNOWN_SCHEMES = ("dir", "shm", "serve", "peer", "redis", "rediss", "s3", "http", "https")
OPEN_PARAMETERS = ("via",)  # query parameters that are never secret
EXTRA = "kv_connector_extra_config"  # a connector's own settings, any of which may be secret
MIN_SCRUBBED = 3  # minimum characters to scrub, because shorter texts are parts of many words


class Secret(str):
    """A key that is masked as a whole."""

    __slots__ = ()

    def __new__(cls, value: str) -> Self:
        return super().__new__(cls, value.reveal() if isinstance(value, Secret) else value)

    def reveal(self) -> str:
        """Return the true text, to connect with it or to pass it to a child process."""
        return str.__str__(self)

    @property
    def masked(self) -> str:
        """The masked text."""
        return MASK

    @property
    def has_secret(self) -> bool:
        """Whether the text contains a secret."""
        return True

    def parts(self) -> Iterator[str]:
        """Yield the secret parts."""
        yield self.reveal()

    def scrub(self, text: str) -> str:
        """Return a text, such as another package's error, with the secret parts masked."""
        found = {form for part in self.parts() for form in (part, unquote(part))}
        for part in sorted(found, key=len, reverse=True):
            if len(part) >= MIN_SCRUBBED:
                text = text.replace(part, MASK)
        return text

    def __str__(self) -> str:
        return self.masked

    def __repr__(self) -> str:
        return repr(self.masked)

    def __format__(self, spec: str) -> str:
        return format(self.masked, spec)


class SecretUrl(Secret):
    """An address, NAME:ADDRESS or a URL.

    Masks the password, a token before the @, and the values of the query. If the scheme is another
    package's, masks all but the scheme."""

    __slots__ = ()

    @property
    def masked(self) -> str:
        scheme, slashes, user, place, query = self._split()
        if not scheme and not user:
            return place + _masked_query(query)
        if scheme not in KNOWN_SCHEMES:
            return f"{scheme}:{MASK}" if scheme else MASK
        name, colon, _ = user.partition(":")
        shown_user = "" if not user else f"{name}:{MASK}@" if colon else f"{MASK}@"
        return f"{scheme}:{slashes}{shown_user}{place}{_masked_query(query)}"

    @property
    def has_secret(self) -> bool:
        """Whether there is text before an @ or a secret value in the query."""
        _, _, user, _, query = self._split()
        return bool(user) or _masked_query(query) != query

    def parts(self) -> Iterator[str]:
        scheme, _, user, place, query = self._split()
        name, colon, password = user.partition(":")
        if colon or name:
            yield user
            yield password if colon else name
        if scheme and scheme not in KNOWN_SCHEMES:
            yield place
        for pair in query.removeprefix("?").split("&"):
            parameter, _, value = pair.partition("=")
            if parameter not in OPEN_PARAMETERS and value:
                yield value

    def _split(self) -> tuple[str, str, str, str, str]:
        """Return scheme, slashes, text before the last @, host with path, and query with `?`."""
        scheme, colon, rest = self.reveal().partition(":")
        if not colon:
            scheme, rest = "", scheme
        slashes = "//" if rest.startswith("//") else ""
        user, _, place = rest.removeprefix(slashes).rpartition("@")
        place, sign, query = place.partition("?")
        return scheme, slashes, user, place, sign + query


class SecretJson(Secret):
    """JSON settings of a connector; the connector's own settings in it are masked."""

    __slots__ = ()

    @property
    def has_secret(self) -> bool:
        return self.masked != self.reveal()

    @property
    def masked(self) -> str:
        try:
            fields = json.loads(self.reveal())
        except (ValueError, RecursionError):
            return MASK
        if not isinstance(fields, dict):
            return MASK
        if not fields.get(EXTRA):
            return self.reveal()
        return json.dumps(fields | {EXTRA: MASK})


def _masked_query(query: str) -> str:
    """Return a query such as `?a=1&via=nixl` with secret values masked."""
    if not query:
        return ""
    pairs = [pair.partition("=") for pair in query.removeprefix("?").split("&")]
    shown = (
        f"{name}={value if name in OPEN_PARAMETERS else MASK}" if value else name
        for name, _, value in pairs
    )
    return "?" + "&".join(shown)


def wrap_secrets(config: Any) -> None:
    """Convert a frozen dataclass's secret fields to their masking types.

    `__post_init__` calls this before it checks anything."""
    for item in dataclasses.fields(config):
        kind, value = item.metadata.get("secrecy"), getattr(config, item.name)
        if kind is None or value is None:
            continue
        values = (value,) if isinstance(value, str) else tuple(value)
        wrapped = tuple(kind(each) if isinstance(each, str) else each for each in values)
        object.__setattr__(config, item.name, wrapped[0] if isinstance(value, str) else wrapped)


def public_value(value: Any) -> Any:
    """Return a setting's value with its secrets masked, as plain data."""
    if isinstance(value, Secret):
        return value.masked
    if isinstance(value, tuple | list):
        return type(value)(public_value(each) for each in value)
    return value


def reveal_secret(value: Any) -> Any:
    """Return a secret's true text: msgspec's hook for the configuration of a child process."""
    if isinstance(value, Secret):
        return value.reveal()
    raise NotImplementedError(f"{type(value).__name__} cannot be sent")
