"""The protocol between an engine that serves blocks and its peers, over TCP.

    server    MAGIC | nonce (32 bytes)
    client    nonce (32) | HMAC-SHA256(secret, "client" | both nonces)
    server    HMAC-SHA256(secret, "server" | both nonces)
    client    kind u8 | number of keys u32 | keys of 68 bytes
    server    FIND: a byte for each key, 1 or 0
              GET: for each key the length of its value u64, or NOTHING, and the value
              REMOVE: a byte, 1
              DESCRIBE: a length u64, and how to read its memory directly (`direct.py`), or nothing
              PLACES: for each key an address u64, the bytes of data there u64 or NOTHING, and the
              header of its value

Both sides prove that they know the secret, and neither sends it. All later messages are
unencrypted. Values are envelopes with checksums (`store.py`), which their reader checks. A server
always needs a secret, because every user of this machine can reach its port.
"""

import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence

from quire.base.errors import ConfigError
from quire.engine.connectors.store import KEY, StoreError

MAGIC = b"QUIREKV1"
NONCE_BYTES, PROOF_BYTES = 32, 32
HEAD = struct.Struct("<BI")
LENGTH = struct.Struct("<Q")
NOTHING = (1 << 64) - 1
FIND, GET, REMOVE, DESCRIBE, LOCATIONS = 1, 2, 3, 4, 5
LOCATION = struct.Struct("<QQ")
MAX_DESCRIPTION_BYTES = 1 << 20
MAX_KEYS = 1 << 16
SECRET = "QUIRE_KV_SECRET"  # an environment variable, because all users can see a flag


def parse_address(kind: str, text: str) -> tuple[str, int]:
    """Split HOST:PORT. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"{kind}:// takes HOST:PORT, such as {kind}://127.0.0.1:7400, got {text!r}."
        )
    return host, int(port)


def secret_for(host: str, kind: str) -> bytes:
    """Return the secret that both sides know. Raises ConfigError if it is not set."""
    secret = os.environ.get(SECRET, "")
    if not secret.strip():
        raise ConfigError(
            f"{kind}://{host} needs a secret, because any process that reaches its port could read"
            f" cached prompts. Set the environment variable {SECRET} to the same long random text"
            " for all engines."
        )
    return secret.encode()


def receive(
    sock: socket.socket, num: int, into: bytearray | None = None, until_s: float | None = None
) -> memoryview:
    """Return `num` bytes. until_s: deadline for all of them, by the monotonic clock; without it,
    the socket's timeout limits each part. Raises OSError, also if the other side has closed."""
    buffer = bytearray(num) if into is None else into
    view, done = memoryview(buffer)[:num], 0
    while done < num:
        if until_s is not None:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the other side takes too long")
            sock.settimeout(left_s)
        got = sock.recv_into(view[done:])
        if not got:
            raise ConnectionError("the other side has closed the connection")
        done += got
    return view


def greet(sock: socket.socket, secret: bytes, timeout_s: float) -> None:
    """Begin a connection as its server. Raises OSError for a client without the secret, or if its
    proof is not complete in time, even if parts of it arrive."""
    mine, until_s = secrets.token_bytes(NONCE_BYTES), time.monotonic() + timeout_s
    sock.settimeout(timeout_s)
    sock.sendall(MAGIC + mine)
    answer = bytes(receive(sock, NONCE_BYTES + PROOF_BYTES, until_s=until_s))
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"client", mine, theirs)):
        raise ConnectionError("a peer does not have the secret")
    sock.sendall(_proof(secret, b"server", mine, theirs))


def introduce(sock: socket.socket, secret: bytes, until_s: float | None = None) -> None:
    """Begin a connection as a client. until_s: as in `receive`. Raises OSError, and StoreError for
    a server that is not quire's or has another secret."""
    head = bytes(receive(sock, len(MAGIC) + NONCE_BYTES, until_s=until_s))
    if not head.startswith(MAGIC):
        raise StoreError("no quire engine serves blocks at this address; check it.")
    theirs, mine = head[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
    sock.sendall(mine + _proof(secret, b"client", theirs, mine))
    try:
        proof = bytes(receive(sock, PROOF_BYTES, until_s=until_s))
    except ConnectionError as error:
        raise StoreError(
            f"it has another secret; set {SECRET} to the same value on both sides."
        ) from error
    if not hmac.compare_digest(proof, _proof(secret, b"server", theirs, mine)):
        raise StoreError(f"it has another secret; set {SECRET} to the same value on both sides.")


def _proof(secret: bytes, side: bytes, server: bytes, client: bytes) -> bytes:
    return hmac.new(secret, side + server + client, hashlib.sha256).digest()


def request(kind: int, keys: Sequence[bytes]) -> bytes:
    return HEAD.pack(kind, len(keys)) + b"".join(keys)


def receive_request(sock: socket.socket) -> tuple[int, list[bytes]]:
    """Return the kind of a request, and its keys. Raises OSError."""
    kind, num = HEAD.unpack(receive(sock, HEAD.size))
    if kind not in (FIND, GET, REMOVE, DESCRIBE, LOCATIONS) or num > MAX_KEYS:
        raise ConnectionError("a peer sent an invalid request")
    data = bytes(receive(sock, num * KEY.size))
    return kind, [data[i : i + KEY.size] for i in range(0, len(data), KEY.size)]
