"""Which network addresses a server may fetch media from: public ones only.

A client names a URL, so it must not reach the operator's own network through the server. Names are
resolved once; the connection goes to the very address that was checked, so that a second answer of
the name server cannot replace it.
"""

import ipaddress
import socket
from collections.abc import Callable

from quire.base.errors import RequestError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], list[str]]

NAT64 = ipaddress.ip_network("64:ff9b::/96")


def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host. Raises OSError if it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[4][0]) for address in found))


def is_public(address: str) -> bool:
    """Whether an address is a public unicast one, also where an IPv6 address wraps an IPv4 one."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return all(each.is_global and not each.is_multicast for each in _all_forms(parsed))


def _all_forms(address: Address) -> list[Address]:
    """Return the address and the IPv4 addresses inside it. An IPv4 address mapped into IPv6 counts
    as the IPv4 address alone."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    inner: list[Address] = [each for each in (address.sixtofour,) if each is not None]
    inner += address.teredo or ()
    if address in NAT64:
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    return [address, *inner]


def public_address(host: str, port: int, resolver: Resolver = resolve) -> str:
    """Return an address of the host to connect to.

    Raises RequestError if the host cannot be resolved, or if any of its addresses is not public.
    """
    try:
        addresses = resolver(host, port)
    except OSError as error:
        raise RequestError(f"the host {host!r} cannot be resolved: {error}.") from None
    for address in addresses:
        if not is_public(address):
            raise RequestError(
                f"the host {host!r} has the address {address}, which is not public; media are"
                " fetched from public addresses only. Send the file as a data: URL."
            )
    if not addresses:
        raise RequestError(f"the host {host!r} has no address.")
    return addresses[0]
