"""Keeps listening sockets of a library to one address, when it binds them to all and has no option for it.

A classic BPF filter on the socket drops every packet for another address (socket(7), SO_ATTACH_FILTER; the
instructions are those of bpf(4)). The library notices nothing. Since Linux 6.18 that takes CAP_NET_ADMIN.
"""

import ctypes
import os
import socket
import struct
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_SO_ATTACH_FILTER = 26
_ANY = {"0.0.0.0", "::"}  # noqa: S104 - what is looked for

_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF: offsets from here are into the IP header
_IPV4_DESTINATION = 16
_LOAD_WORD, _LOAD_BYTE, _AND, _JUMP_EQUAL, _RETURN = 0x20, 0x30, 0x54, 0x15, 0x06
_ACCEPT, _DROP = 0xFFFFFFFF, 0

_Instruction = tuple[int, int, int, int]
"""code, instructions to skip if true, if false, operand"""


@contextmanager
def listening_only_at(address: str | None) -> Generator[None]:
    """Sockets of this process that begin to listen to all addresses inside of the block hear only what is
    sent to `address`, an IPv4 one; None: nothing at all. Raises OSError where the kernel has no filters."""
    before = {name for name, _ in _descriptors()}
    yield
    for name, number in _descriptors():
        if name not in before:
            with socket.socket(fileno=os.dup(number)) as listener:
                if _listens_to_all(listener):
                    _attach(listener, _only(address))


def _descriptors() -> list[tuple[str, int]]:
    """The sockets of this process: name and number."""
    found: list[tuple[str, int]] = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            name = str(descriptor.readlink())
        except OSError:  # closed meanwhile
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
