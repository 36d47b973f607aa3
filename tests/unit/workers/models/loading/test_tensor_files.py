"""Reading weights costs the memory of what is read, once: the mapped file is let go, and parts are parts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tidemill.workers.models.loading.checkpoint import WeightsFolder
from tidemill.workers.models.loading.sharding import RankSlice, Replicated
from tidemill.workers.models.loading.tensor_files import Span
from tidemill.workers.models.loading.weights import Weight

ROWS, COLUMNS = 4096, 4096  # of float32: 64 MiB, the system maps files by pages of up to 4
ALL_BYTES = 4 * ROWS * COLUMNS


def mapped_bytes(file: Path) -> int:
    """Return the bytes of the file that this process holds in memory."""
    found, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *others = line.split()
        if "-" in first and not first.endswith(":"):
            is_ours = others[-1] == str(file)
        elif is_ours and first == "Rss:":
            found += 1024 * int(others[0])
    return found


def opened(folder: Path, *, digests: bool) -> tuple[WeightsFolder, Path]:
    file = folder / "model.safetensors"
    save_file({"a": torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS).float()}, file)
    checkpoint = WeightsFolder(folder, lambda _done_bytes, _total_bytes: None, digests=digests)
    checkpoint.check({"a": Weight((ROWS, COLUMNS), Replicated())}, lambda _name: False)
    return checkpoint, file


@pytest.mark.parametrize("digests", [True, False])
def test_read_bytes_leave_no_second_copy(tmp_path: Path, *, digests: bool) -> None:
    checkpoint, file = opened(tmp_path, digests=digests)
    weight = checkpoint.read("a", RankSlice(((0, ROWS),))).codes
    assert mapped_bytes(file) < ALL_BYTES / 8
    assert bool((weight[:, 0] == COLUMNS * torch.arange(ROWS)).all())
    assert mapped_bytes(file) < ALL_BYTES / 8, "it is a view of the file"


def test_rank_reads_its_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, file = opened(tmp_path, digests=False)

    def keep(_span: Span) -> None:
        pass

    monkeypatch.setattr(Span, "drop", keep)
    checkpoint.read("a", RankSlice(((ROWS // 2, ROWS // 2 + ROWS // 8),)))
    assert ALL_BYTES / 8 <= mapped_bytes(file) < ALL_BYTES / 2
    checkpoint, file = opened(tmp_path, digests=True)
    checkpoint.read("a", RankSlice(((0, 1),)))
    assert mapped_bytes(file) >= ALL_BYTES, "the leader digests all of it"
