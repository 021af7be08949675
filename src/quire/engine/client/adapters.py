"""Adapters on the client's side: from a directory to the adapter's id, and to requests that use it.

The id is the digest of the adapter's files. The core reads the files itself, when a request needs
them. A weighted set of adapters is an adapter, too.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire.base.errors import ModelError, RequestError
from quire.base.messages import Request
from quire.base.requests.lora_request import LoRARequest
from quire.engine.client.request_maker import RequestMaker
from quire.models.checkpoint.adapter_files import adapter_digest, files_of, read_adapter
from quire.models.checkpoint.adapter_sets import Member, set_of

FIELD = "lora_request"
MAX_KNOWN = 10_000
SETS = "(sets)"  # name of all weighted sets in metrics; no adapter can have it
Stamp = tuple[tuple[int, int], ...]  # time of the last change, and size, of each file


class Adapter(NamedTuple):
    """An adapter. id: digest of its files. path: its directory or GGUF file. name: in metrics."""

    id: str
    path: str
    name: str = ""


def weighted(members: Iterable[tuple[Adapter, float]]) -> Adapter | None:
    """Return the adapter that sums adapters, each with a scale; None if it changes nothing."""
    used = [(adapter, scale) for adapter, scale in members if scale]
    found = set_of(Member(adapter.id, adapter.path, scale) for adapter, scale in used)
    name = used[0][0].name if len(used) == 1 else SETS
    return None if found is None else Adapter(*found, name)


class AdapterIndex:
    """The ids of adapters by path. A digest is computed again if a file has changed."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[Stamp, Adapter]] = {}

    def find(self, given: str, max_rank: int) -> Adapter:
        """Return the adapter of a directory or GGUF file. Raises ModelError if quire does not
        support its files."""
        path = Path(given).absolute()
        try:
            stamp = tuple(_stamp(each) for each in files_of(path))
        except OSError:
            stamp = ()
        known = self._known.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        read_adapter(path, max_rank)
        adapter = Adapter(adapter_digest(path), str(path))
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[path] = stamp, adapter
        return adapter


class AdapterRequests(RequestMaker):
    """Makes requests that use an adapter, by another maker."""

    def __init__(self, maker: RequestMaker, adapter: Adapter) -> None:
        self.tokenizer, self.defaults = maker.tokenizer, maker.defaults
        self.plain, self._adapter = maker, adapter

    def make(self, *args: Any, **named: Any) -> Request:
        """See TextRequestMaker."""
        id, path, name = self._adapter
        made = self.plain.make(*args, **named)
        fields = {"adapter_id": id, "adapter_path": path, "adapter_name": name}
        return msgspec.structs.replace(made, **fields)


def with_adapter(maker: RequestMaker, adapter: Adapter | None) -> RequestMaker:
    """Return a maker of requests that use this adapter only; None: that use no adapter."""
    plain = maker.plain if isinstance(maker, AdapterRequests) else maker
    return plain if adapter is None else AdapterRequests(plain, adapter)


class AdapterMakers:
    """Makers of requests from Python, by adapter. max_rank: of an adapter; 0 if there are none."""

    def __init__(self, max_rank: int) -> None:
        self._max_rank, self._index = max_rank, AdapterIndex()

    def maker_of(self, maker: RequestMaker, given: LoRARequest | None) -> RequestMaker:
        """Return the maker of requests with an adapter; None: without. Raises RequestError for an
        adapter that cannot be used."""
        if given is None:
            return maker
        if not isinstance(given, LoRARequest):
            raise RequestError(
                "lora_request must be a LoRARequest, for one of the model's adapters, got"
                f" {type(given).__name__}.",
                FIELD,
            )
        if not self._max_rank:
            raise RequestError(
                "lora_request needs an engine with adapters; create it with enable_lora=True.",
                FIELD,
            )
        try:
            found = self._index.find(given.lora_path, self._max_rank)
        except ModelError as error:
            raise RequestError(f"the adapter {given.lora_name!r}: {error}", FIELD) from error
        return AdapterRequests(maker, found._replace(name=given.lora_name))


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size
