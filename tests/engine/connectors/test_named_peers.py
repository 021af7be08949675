"""The stores that are searched for a request that names a peer."""

import msgspec
import pytest

from benchmarks.virtual.dry_run import dry_request
from quire.base.settings.kv_transfer import KVTransfer
from quire.engine.connectors.named_peers import NamedPeers

STORES = ("shm:a", "peer://one:7400", "peer://[::1]:7400?via=nixl", "redis://r:6379", "peer:two:1")


def chosen(peer: str, stores: tuple[str, ...] = STORES, keeps: bool = False) -> KVTransfer:
    transfer = KVTransfer(keeps=keeps, waits=not keeps, peer=peer)
    request = msgspec.structs.replace(dry_request("0", [1], 1), kv_transfer=transfer)
    found = NamedPeers(stores).choose(request).kv_transfer
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("peer", "stores"),
    [
        ("one:7400", (0, 1, 3)), ("ONE:7400", (0, 1, 3)), ("two:1", (0, 3, 4)),
        ("[::1]:7400", (0, 2, 3)), ("", ()),
    ],
)  # fmt: skip
def test_request_uses_its_peer_and_no_other_peer(peer: str, stores: tuple[int, ...]) -> None:
    assert chosen(peer).stores == stores


def test_peers_outside_the_settings_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """Also stores that are no peers, such as the Redis server's address."""
    for peer in ("one:7401", "169.254.169.254:80", "r:6379"):
        assert chosen(peer).stores == ()
        assert f"names the peer '{peer}'" in caplog.text
    caplog.clear()
    assert chosen("one:7400", ("shm:a",)).stores == () and not caplog.text


@pytest.mark.parametrize(
    ("store", "address"),
    [
        ("serve://10.0.0.7:7400", "10.0.0.7:7400"), ("serve:host:1?via=nixl", "host:1"),
        ("serve://0.0.0.0:7400", ""), ("serve://[::]:7400", ""), ("serve://host:0", ""),
        ("shm:a", ""),
    ],
)  # fmt: skip
def test_address_is_set_only_if_other_engines_can_reach_it(store: str, address: str) -> None:
    assert chosen("", (store,), keeps=True).address == address
    assert chosen("", (store,)).address == ""
