"""A link to a network namespace that delays packets and loses some.

python tests/support/e2e/tun.py NAMESPACE NEAR FAR FILE, as root: FAR is the address of the namespace, NEAR of
this end. `Loss` is read from FILE, as JSON. The program prints a line when the link is up, and ends with its
input.
"""

import asyncio
import ctypes
import fcntl
import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
PACKET_BYTES = 16000
LOOK_S = 0.05
READY = "the line is there"


@dataclass(frozen=True, slots=True)
class Loss:
    """`delay_s` is one way, the share is of packets."""

    delay_s: float = 0.0
    lost_share: float = 0.0


class Way:
    """One direction."""

    def __init__(self, source: int, target: int, weather: Callable[[], Loss]) -> None:
        self._source, self._target, self._weather = source, target, weather
        self._loop = asyncio.get_running_loop()
        self._due_s = 0.0
        self._loop.add_reader(source, self._take)

    def _take(self) -> None:
        packet = os.read(self._source, 1 << 16)
        weather = self._weather()
        if random.random() < weather.lost_share:
            return
        self._due_s = max(self._due_s + 1e-6, self._loop.time() + weather.delay_s)  # nothing overtakes
        self._loop.call_at(self._due_s, os.write, self._target, packet)


def end_of_line(name: str) -> int:
    """A device in the namespace of this process."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


def enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def ip(*words: str) -> None:
    subprocess.run(["/usr/bin/env", "ip", *words], check=True)


def join(namespace: str, near: str, far: str) -> tuple[int, int]:
    """Both ends of a line to a new namespace, open."""
    ip("netns", "add", namespace)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    inside = ("netns", "exec", namespace, "ip")
    here = end_of_line(f"{namespace}0")
    enter(there)
    beyond = end_of_line(f"{namespace}1")
    enter(home)
    for words, device, own, other in (((), f"{namespace}0", near, far), (inside, f"{namespace}1", far, near)):
        ip(*words, "address", "add", own, "peer", other, "dev", device)
        ip(*words, "link", "set", device, "mtu", str(PACKET_BYTES), "up")
    ip(*inside, "link", "set", "lo", "up")
    return here, beyond


async def carry(near_end: int, far_end: int, file: Path) -> None:
    """Carry packets until the input ends."""
    weather = [Loss()]

    def read_loss() -> Loss:
        return Loss(**json.loads(file.read_text()))

    async def look() -> None:
        while True:
            weather[0] = await asyncio.to_thread(read_loss)
            await asyncio.sleep(LOOK_S)

    ways = [Way(near_end, far_end, lambda: weather[0]), Way(far_end, near_end, lambda: weather[0])]
    looking = asyncio.create_task(look())
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    looking.cancel()
    del ways


def main(namespace: str, near: str, far: str, file: str) -> None:
    try:
        asyncio.run(carry(*join(namespace, near, far), Path(file)))
    finally:
        ip("netns", "delete", namespace)


if __name__ == "__main__":
    main(*sys.argv[1:])
