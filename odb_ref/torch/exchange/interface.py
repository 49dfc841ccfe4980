"""Chooses the address and ports at which the exchange listens on this host: see docs/explanation/network.md."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Final

from torch.distributed.distributed_c10d import Store

from odb_ref.core.errors import UsageError

INTERFACE_VARIABLE: Final = "GLOO_SOCKET_IFNAME"
"""The variable that names the interface, as for gloo; the first of several, separated by commas, that has an address."""
PORTS_VARIABLE: Final = "ODB_REF_PORTS"
"""The variable that limits the ports, for example ``29600-29699``. Without it any port may be used."""

_INTERFACE: Final = struct.Struct("256s")
_SIOCGIFADDR: Final = 0x8915
_ELSEWHERE: Final = ("192.0.2.1", "2001:db8::1")
"""Addresses that no host has. Packets to them would take the default route."""


def choose_address(store: Store) -> str:
    """Returns the one address to listen at: that of the named interface, otherwise the one that reaches the job's master.

    On the master's own host its name often resolves to the loopback interface, which no other host can reach. There the address
    is that of the host name, of the default route, or of the first interface with one. Loopback is used only if the master's
    name itself is a loopback name.

    Raises: UsageError when there is no interface of that name.
    """
    for name in filter(None, map(str.strip, os.environ.get(INTERFACE_VARIABLE, "").split(","))):
        if address := _find_address_of(name):
            return address
    master = find_master(store)
    candidates = [_find_source_of(master)] if master else []
    if not master or not _is_loopback(master):
        candidates += [*_find_addresses_of_host(), *map(_find_source_of, _ELSEWHERE)]
        candidates += [_read_address(name) for _, name in socket.if_nameindex()]  # a host may have no default route
        candidates = [address for address in candidates if not _is_loopback(address)]
    for address in filter(None, candidates):
        if not ipaddress.ip_address(address.partition("%")[0]).is_link_local:  # valid only on its own interface
            return address
    return "127.0.0.1"


def find_master(store: Store) -> str:
    """Returns the host of the job's store, otherwise the host in the environment. Empty if neither is known."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return str(getattr(store, "host", "") or os.environ.get("MASTER_ADDR", ""))


def list_ports() -> Sequence[int]:
    """Returns the ports to try, in order; 0 stands for any port.

    Raises: UsageError when the environment variable is not a port or a range.
    """
    text = os.environ.get(PORTS_VARIABLE, "")
    if not text:
        return (0,)
    first, dash, last = text.partition("-")
    with contextlib.suppress(ValueError):
        ports = range(int(first), int(last if dash else first) + 1)
        if ports and ports[0] > 0 and ports[-1] < 1 << 16:
            return ports
    raise UsageError(f"{PORTS_VARIABLE} must be a port or a range such as 29600-29699, got {text!r}")


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def _find_addresses_of_host() -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        found = [str(item[4][0]) for item in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    return [address for address in found if not _is_loopback(address) and _can_bind(address)]


def _can_bind(address: str) -> bool:
    """Returns False if the host name resolves to an address that the host does not have (any more)."""
    with contextlib.suppress(OSError):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            return True
    return False


def _find_address_of(interface: str) -> str:
    if sys.platform == "win32":
        raise UsageError(f"{INTERFACE_VARIABLE} names a network interface, which only Linux supports: unset it")
    known = [name for _, name in socket.if_nameindex()]
    if interface not in known:
        raise UsageError(f"{INTERFACE_VARIABLE} names {interface!r}, but this host has only {', '.join(known)}")
    return _read_address(interface)


def _read_address(interface: str) -> str:
    """Returns the IPv4 address of an interface, or an empty string if it has none, or the system does not tell."""
    if sys.platform != "win32":
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, _INTERFACE.pack(interface.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
    return ""


def _find_source_of(target: str) -> str:
    """Returns the address from which this host would send to ``target``, or an empty string. Sends nothing."""
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return ""
