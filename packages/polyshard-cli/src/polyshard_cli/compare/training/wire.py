"""Bytes that this process has put on TCP connections, from the kernel's own books.

Every engine over gloo is counted alike, by what it really sends: payload, and what the library
puts around it. Retransmissions are left out. Linux alone says so (``TCP_INFO``).
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

__all__ = ["Connections", "sent_between", "sent_so_far"]

Connections = dict[str, int]
"""Bytes sent so far, by connection (the inode of its socket)."""

DESCRIPTORS = Path("/proc/self/fd")
INFO_BYTES = 256
SENT_OFFSET = 200  # tcpi_bytes_sent and tcpi_bytes_retrans of struct tcp_info, since Linux 4.19


def sent_so_far() -> Connections | None:
    """Of each connection of this process; ``None`` where the kernel does not say."""
    if not DESCRIPTORS.is_dir() or not hasattr(socket, "TCP_INFO"):
        return None
    found: Connections = {}
    for entry in DESCRIPTORS.iterdir():
        with suppress(OSError):  # closed meanwhile, no socket, or none of TCP
            target = os.readlink(entry)
            if target.startswith("socket:"):
                found[target] = _sent(int(entry.name))
    return found


def sent_between(before: Connections | None, after: Connections | None) -> int | None:
    """Bytes of all connections that are open at the end, those opened in between included."""
    if before is None or after is None:
        return None
    return sum(sent - before.get(name, 0) for name, sent in after.items())


def _sent(descriptor: int) -> int:
    """Raises OSError for what is not a connection of TCP, or a kernel that says less."""
    with socket.socket(fileno=os.dup(descriptor)) as own:
        info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    if len(info) < SENT_OFFSET + 16:
        raise OSError("this kernel does not count bytes sent")
    sent, again = struct.unpack_from("=QQ", info, SENT_OFFSET)
    return int(sent - again)
