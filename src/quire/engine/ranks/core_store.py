"""Ranks' side of the rendezvous (engine/ranks/rendezvous.py): a torch store for gloo and NCCL."""

import socket
import threading
import time
from datetime import timedelta

from torch._C._distributed_c10d import Store

from quire.engine.ranks.messages import Stream
from quire.engine.ranks.rendezvous import StoreAnswer, StoreCall, rank_store_codec

LOOK_S = 0.005  # between two checks whether a rank has set a key
LIMIT = timedelta(seconds=300)


class CoreStore(Store):
    """Store in the core, usable from any thread. name: name of the group of ranks, which prefixes
    its keys. Calls raise RuntimeError, as torch expects, if the core has disconnected."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        super().__init__()
        self._stream, self._name = Stream(sock, rank_store_codec()), name
        self._lock = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        self._call(StoreCall("set", [self._own(key)], data))

    def get(self, key: str) -> bytes:
        self.wait([key])
        value = self._call(StoreCall("get", [self._own(key)])).value
        if value is None:
            raise RuntimeError(f"the key {key} was deleted while it was waited for")
        return value

    def add(self, key: str, number: int) -> int:
        return self._call(StoreCall("add", [self._own(key)], number=number)).number

    def check(self, keys: list[str]) -> bool:
        return bool(self._call(StoreCall("check", [self._own(key) for key in keys])).number)

    def wait(self, keys: list[str], timeout: timedelta = LIMIT) -> None:
        end_s = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > end_s:
                raise RuntimeError(f"no rank has set {', '.join(keys)} within {timeout}")
            time.sleep(LOOK_S)

    def delete_key(self, key: str) -> bool:
        return bool(self._call(StoreCall("delete", [self._own(key)])).number)

    def num_keys(self) -> int:
        return self._call(StoreCall("count")).number

    def _own(self, key: str) -> str:
        return f"{self._name}/{key}"

    def _call(self, call: StoreCall) -> StoreAnswer:
        with self._lock:
            try:
                self._stream.send(call)
            except OSError as error:
                raise RuntimeError(f"the connection to the core ended ({error})") from None
            while (answers := self._stream.receive()) is not None:
                if answers:
                    return answers[0]
            raise RuntimeError("the connection to the core ended")
