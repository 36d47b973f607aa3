"""Collectives of processes on one machine: columns in shared memory, and a byte over a socket as the
signal.

    memory     | slot 0: rank 0 | rank 1 | ... | slot 1: rank 0 | rank 1 | ... |      round n uses slot n % 2
    round n    copy into the own part; a byte to each other rank; a byte from each of them; copy from theirs

A rank writes its part of a slot again two rounds later. By then every other rank has sent the byte of the
round between, and so has read it. The end of a process closes its sockets, which ends the wait of the
others.

It is for CPUs: waking a thread by a byte takes a fraction of the time of a round of gloo's threads, and a
waiting rank leaves its core to the others (decision 9).
"""

import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch

from tidemill.workers.models.collectives import LEADER
from tidemill.workers.parallel.errors import GroupBroken

PLACE_BYTES = 4 << 20
LOOK_S = 0.01


class SharedMemory:
    """The ranks of one machine. The constructor blocks until all have joined.

    folder      one for the group, new, accessible to this user only: the ranks find each other's sockets in
    it
    wait_s_max  the time that a rank may delay the others, here and in each call; then GroupBroken is raised
    """

    def __init__(
        self, folder: Path, index: int, size: int, wait_s_max: float, place_bytes: int = PLACE_BYTES
    ) -> None:
        self.index = index
        self.size = size
        self._share_bytes = place_bytes
        self._wait_s_max = wait_s_max
        self._round = 0
        self._sockets: list[socket.socket] = []
        memory = [os.memfd_create("tidemill-group")] if index == LEADER else []
        try:
            for fd in memory:
                os.ftruncate(fd, 2 * size * place_bytes)
            with closing(socket.socket(socket.AF_UNIX)) as listener:
                listener.settimeout(wait_s_max)
                listener.bind(str(_address(folder, index)))
                listener.listen()
                for rank in range(index):
                    self._sockets.append(_call(folder, rank, wait_s_max))
                for _ in range(index + 1, size):
                    self._sockets.append(listener.accept()[0])
            for other in self._sockets:
                _wait_at_most(other, wait_s_max)
                if index == LEADER:
                    socket.send_fds(other, [b"\0"], memory)
            if index != LEADER:
                memory = list(socket.recv_fds(self._sockets[LEADER], 1, 1)[1])
            if not memory:
                raise ConnectionError("the leader ended before")
            self._memory = torch.frombuffer(mmap.mmap(memory[0], 2 * size * place_bytes), dtype=torch.uint8)
        except OSError as error:
            self.close()
            raise GroupBroken(f"not all {size} ranks have come ({error})") from error
        finally:
            for fd in memory:
                os.close(fd)

    def gather(self, x_TN: torch.Tensor, width: int) -> torch.Tensor:
        return _joined([_side_by_side(all_RTN, width) for all_RTN in self._rounds(x_TN)])

    def reduce(self, x_TN: torch.Tensor) -> torch.Tensor:
        """Add in the order of the ranks, from 0."""
        return _joined([added(all_RTN) for all_RTN in self._rounds(x_TN)])

    def gather_to_leader(self, x_TN: torch.Tensor, width: int) -> torch.Tensor:
        if self.index == LEADER:
            return self.gather(x_TN, width)
        for _ in self._rounds(x_TN):
            """The leader reads."""
        return x_TN[:, :0]

    def broadcast(self, x: torch.Tensor) -> None:
        flat = x.view(-1, 1)
        sent = [all_RTN[LEADER].clone() for all_RTN in self._rounds(flat)]
        if self.index != LEADER:
            flat.copy_(_joined(sent))

    def meet(self) -> None:
        """Wait until every rank has called this, without a limit. Raises GroupBroken when one has ended."""
        self._set_wait(0.0)  # for ever
        self._signal()
        self._set_wait(self._wait_s_max)

    def close(self) -> None:
        """End what the other ranks wait for."""
        for other in self._sockets:
            other.close()

    def _rounds(self, x_TN: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the data of all ranks in rounds of as many rows as fit, `[R, T, N]`; valid until the next
        round."""
        tokens, columns = x_TN.shape
        rows = self._share_bytes // (columns * x_TN.element_size())
        assert rows, "a row is larger than a rank's part of a slot"
        for start in range(0, tokens, rows):
            yield self._show(x_TN[start : start + rows])

    def _show(self, x_TN: torch.Tensor) -> torch.Tensor:
        tokens, columns = x_TN.shape
        offset = self._share_bytes // x_TN.element_size()
        all_RTN = self._memory.view(x_TN.dtype).as_strided(
            (self.size, tokens, columns), (offset, columns, 1), self._round % 2 * self.size * offset
        )
        self._round += 1
        all_RTN[self.index].copy_(x_TN)
        self._signal()
        return all_RTN

    def _signal(self) -> None:
        """Send a byte to every other rank, and wait for theirs."""
        try:
            for other in self._sockets:
                other.send(b"\0")
            if not all(other.recv(1) for other in self._sockets):
                raise GroupBroken("a rank is gone")
        except OSError as error:
            raise GroupBroken(f"a rank is gone, or does not come ({error})") from error

    def _set_wait(self, wait_s: float) -> None:
        for other in self._sockets:
            _wait_at_most(other, wait_s)


def _address(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"


def _call(folder: Path, rank: int, wait_s_max: float) -> socket.socket:
    """Connect to a rank that may not listen yet."""
    caller = socket.socket(socket.AF_UNIX)
    for _ in range(round(wait_s_max / LOOK_S)):
        try:
            caller.connect(str(_address(folder, rank)))
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(LOOK_S)
        else:
            return caller
    caller.close()
    raise TimeoutError(f"rank {rank} does not listen")


def _wait_at_most(connection: socket.socket, wait_s: float) -> None:
    """Set a timeout in the kernel, 0 for none: with one of Python's own, each byte costs one more system
    call."""
    connection.setblocking(True)  # noqa: FBT003  the method's name explains the argument
    whole, part = divmod(wait_s, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(whole), int(part * 1e6)))


def _side_by_side(all_RTN: torch.Tensor, width: int) -> torch.Tensor:
    """Return a copy, whatever the strides: the memory is written again."""
    y_TRN = all_RTN.transpose(0, 1).clone(memory_format=torch.contiguous_format)
    return y_TRN.view(len(y_TRN), -1)[:, :width].contiguous()


def added(all_RTN: torch.Tensor) -> torch.Tensor:
    """Return the sum over the ranks, in their order, `[T, N]`."""
    sum_TN = all_RTN[0].clone()
    for x_TN in all_RTN[1:]:
        sum_TN += x_TN
    return sum_TN


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
