"""Restricts sockets of a library to one address, when it listens on all and has no option for that.

A classic BPF filter on the socket drops every packet for another address (socket(7),
SO_ATTACH_FILTER; the instructions are those of bpf(4)). The library does not notice. Since Linux
6.18 it needs CAP_NET_ADMIN.
"""

import ctypes
import os
import socket
import struct
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_SO_ATTACH_FILTER = 26
_ANY = {"0.0.0.0", "::"}  # noqa: S104 - addresses to search for

_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF: offsets from here are into the IP header
_IPV4_DESTINATION = 16
_LOAD_WORD, _LOAD_BYTE, _AND, _JUMP_EQUAL, _RETURN = 0x20, 0x30, 0x54, 0x15, 0x06
_ACCEPT, _DROP = 0xFFFFFFFF, 0

_Instruction = tuple[int, int, int, int]
"""The code, the instructions to skip if true and if false, and the operand."""


@contextmanager
def restrict_listeners(address: str | None) -> Generator[None]:
    """Restrict sockets that start to listen on all addresses inside the block to `address` (IPv4). With None
    they receive nothing. Raises OSError if the kernel refuses filters."""
    before = {name for name, _ in _descriptors()}
    yield
    for name, number in _descriptors():
        if name not in before:
            with socket.socket(fileno=os.dup(number)) as listener:
                if _listens_to_all(listener):
                    _attach(listener, _only(address))


def _descriptors() -> list[tuple[str, int]]:
    """Return the name and number of each socket of this process."""
    found: list[tuple[str, int]] = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            name = str(descriptor.readlink())
        except OSError:  # it was closed in the meantime
            continue
        if name.startswith("socket:"):
            found.append((name, int(descriptor.name)))
    return found


def _listens_to_all(listener: socket.socket) -> bool:
    return (
        listener.family in {socket.AF_INET, socket.AF_INET6}
        and listener.type == socket.SOCK_STREAM
        and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
        and listener.getsockname()[0] in _ANY
    )


def _only(address: str | None) -> list[_Instruction]:
    if address is None:
        return [(_RETURN, 0, 0, _DROP)]
    [destination] = struct.unpack("!I", socket.inet_aton(address))
    return [
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        (_AND, 0, 0, 0xF0),
        (_JUMP_EQUAL, 0, 3, 0x40),  # IPv4
        (_LOAD_WORD, 0, 0, _NETWORK_HEADER + _IPV4_DESTINATION),
        (_JUMP_EQUAL, 0, 1, destination),
        (_RETURN, 0, 0, _ACCEPT),
        (_RETURN, 0, 0, _DROP),
    ]


def _attach(listener: socket.socket, program: list[_Instruction]) -> None:
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    described = struct.pack("HP", len(program), ctypes.addressof(instructions))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)
