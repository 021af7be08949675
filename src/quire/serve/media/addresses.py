"""Network addresses that a server may fetch media from: public ones only.

A client names a URL, so it must not reach the operator's own network through the server. A name is
resolved once, and the connection goes to the address that was checked. A second reply of the name
server cannot replace it.
"""

import ipaddress
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future

from quire.base.errors import EngineBusy, RequestError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], list[str]]

NAT64 = ipaddress.ip_network("64:ff9b::/96")
MAX_LOOKUPS = 16  # names that may be resolved at once


def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host. Raises OSError if it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[4][0]) for address in found))


def is_public(address: str) -> bool:
    """Return whether an address, and any IPv4 address inside it, is a public unicast address."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return all(each.is_global and not each.is_multicast for each in _all_forms(parsed))


def _all_forms(address: Address) -> list[Address]:
    """Return the address and the IPv4 addresses inside it. For an IPv4 address in mapped or NAT64
    form, return only the IPv4 address."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    inner: list[Address] = [each for each in (address.sixtofour,) if each is not None]
    inner += address.teredo or ()
    if address in NAT64:
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    return [address, *inner]


class Lookups:
    """Resolver of names with a timeout, MAX_LOOKUPS at once.

    The C library's resolver cannot be interrupted. So it runs in a thread, which may outlive the
    timeout and counts until it ends.
    """

    def __init__(self, resolver: Resolver = resolve) -> None:
        self._resolver = resolver
        self._free = threading.BoundedSemaphore(MAX_LOOKUPS)

    def addresses(self, host: str, port: int, timeout_s: float) -> list[str]:
        """Return the addresses of a host. Raises TimeoutError, the resolver's error, or EngineBusy
        if too many names are being resolved."""
        if not self._free.acquire(blocking=False):
            raise EngineBusy(f"{MAX_LOOKUPS} names of hosts are being resolved; try again later.")
        found: Future[list[str]] = Future()

        def look_up() -> None:
            try:
                found.set_result(self._resolver(host, port))
            except BaseException as error:
                found.set_exception(error)
            finally:
                self._free.release()

        threading.Thread(target=look_up, name="resolver", daemon=True).start()
        return found.result(timeout_s)


def public_address(host: str, port: int, timeout_s: float, lookups: Lookups) -> str:
    """Return an address of the host to connect to.

    Raises RequestError if the host cannot be resolved in time, or if any of its addresses is not
    public. Raises EngineBusy if too many names are being resolved.
    """
    try:
        addresses = lookups.addresses(host, port, timeout_s)
    except TimeoutError:
        raise RequestError(
            f"the host {host!r} cannot be resolved within {timeout_s:.1f} s; send the file as a"
            " data: URL."
        ) from None
    except (OSError, UnicodeError) as error:
        raise RequestError(
            f"the host {host!r} cannot be resolved: {error}; correct the URL."
        ) from None
    for address in addresses:
        if not is_public(address):
            raise RequestError(
                f"the host {host!r} has the address {address}, which is not public; media are"
                " fetched from public addresses only. Send the file as a data: URL."
            )
    if not addresses:
        raise RequestError(f"the host {host!r} has no address; correct the URL.")
    return addresses[0]
