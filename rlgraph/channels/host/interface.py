"""The network interface of an address, which gloo and NCCL want to know by name."""

import fcntl
import os
import socket
import struct

ADDRESS_OF, MASK_OF = 0x8915, 0x891B  # SIOCGIFADDR, SIOCGIFNETMASK
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def talk_at(address: str) -> None:
    """Let gloo and NCCL of this process use the interface of an address, unless the user has named one.

    Otherwise they take the first interface, or resolve the host's own name, which names a loopback address on many hosts.
    """
    name = interface_of(address)
    for variable in VARIABLES if name else ():
        os.environ.setdefault(variable, name)


def interface_of(address: str) -> str:
    """Find the interface that has an IPv4 address, else the one whose network it lies in; empty if there is none.

    >>> interface_of("127.0.0.1")
    'lo'
    """
    try:
        wanted = _number(socket.inet_aton(address))
    except OSError:
        return ""  # an IPv6 address
    around = ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                own, mask = (_number(_asked(asking, what, name)) for what in (ADDRESS_OF, MASK_OF))
            except OSError:
                continue  # it has no IPv4 address
            if own == wanted:
                return name
            if own & mask == wanted & mask:
                around = around or name
    return around


def _asked(asking: socket.socket, what: int, name: str) -> bytes:
    return fcntl.ioctl(asking, what, struct.pack("256s", name.encode()))[20:24]


def _number(address: bytes) -> int:
    return int.from_bytes(address, "big")
