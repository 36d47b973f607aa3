"""Small objects in a folder, for the tests of the file store."""

import os
from pathlib import Path

from tests.support.kvstore.objects import page
from tests.support.kvstore.store_process import body
from tidemill.kvstore.stores.folder_bound import BLOCK_BYTES
from tidemill.kvstore.stores.object_folder import ObjectFolder
from tidemill.kvstore.stores.page_store import Got, Put
from tidemill.kvstore.stores.seal import SEAL_BYTES

BODY_BYTES = BLOCK_BYTES - SEAL_BYTES
OBJECT_BYTES = BODY_BYTES + SEAL_BYTES
AMPLE_BYTES = 1 << 30


def put(folder: ObjectFolder, *numbers: int) -> list[Put]:
    return folder.put([(page(number), memoryview(body(number, 1, BODY_BYTES))) for number in numbers])


def get(folder: ObjectFolder, number: int) -> Got:
    view = bytearray(BODY_BYTES)
    [outcome] = folder.get([(page(number), memoryview(view))])
    assert outcome is not Got.HIT or view == body(number, 1, BODY_BYTES)
    return outcome


def object_path(path: Path, number: int) -> Path:
    [found] = path.glob(f"objects/*/{page(number)}")
    return found


def age(path: Path, by_s: float) -> None:
    status = path.stat()
    os.utime(path, (status.st_atime, status.st_mtime - by_s))


def stored_bytes(path: Path) -> int:
    """The bytes that the objects take on disk."""
    return sum(file.stat().st_blocks * 512 for file in path.glob("objects/*/*"))
