"""The memory of workers, as the server and as the kernel report it."""

import re
from pathlib import Path
from typing import Any

import httpx

from tests.support.e2e.server import NO_TLS, Server

KINDS = ("pages", "states", "windows")
MAPPED = (*(f"{kind}_{part}" for kind in KINDS for part in ("live", "cached")), "free", "empty")


def memory_of(server: Server, **order: object) -> dict[str, dict[str, Any]]:
    """Return the workers' rows of `tidemill memory` by name, after an optional order."""
    url = f"{server.url}/cluster/memory"
    with httpx.Client(timeout=300, verify=NO_TLS) as client:
        answer = client.post(url, json=order) if order else client.get(url)
    assert answer.status_code == httpx.codes.OK, answer.text
    return {row["name"]: row for row in answer.json()["workers"]}


def mapped_bytes(row: dict[str, Any]) -> int:
    return sum(row["memory"][name] for name in MAPPED)


def resident_bytes(pid: int, reserved_bytes: int) -> int:
    """Return the resident bytes of the arena, from the kernel. The arena is excluded from core dumps ("dd"),
    as little else is, so the kernel merges its mapping with no neighbour."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    mapping = r"^Size: +(\d+) kB\n(?:\w+: .*\n)*?Rss: +(\d+) kB\n(?:\w+: .*\n)*?VmFlags: (.*)$"
    (resident,) = (
        int(resident) << 10
        for size, resident, flags in re.findall(mapping, text, re.MULTILINE)
        if "dd" in flags.split() and int(size) << 10 == reserved_bytes
    )
    return resident
