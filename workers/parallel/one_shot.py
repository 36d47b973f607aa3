"""All-reduces of small tensors in one launch: each GPU of a node reads the terms of all others itself.

The terms lie in memory that the GPUs map from each other (torch's symmetric memory). NCCL takes longer for
small tensors, and less time for large ones.
"""

from pkgutil import resolve_name
from typing import Any

import torch

from tidemill.workers.settings import SettingsError

NAME = "tidemill"
"""The group's name in torch, which knows each name once: a process has one group with this exchange."""

ALIGNED_BYTES = 16  # of the widest load
DTYPES = {torch.float32, torch.bfloat16}


class OneShot:
    """The exchange of one rank, for sums of up to `bytes_max` bytes. It may be captured in a CUDA graph.

    Each rank adds the terms in the order of the ranks, from 0, and rounds each sum to the type of the terms.
    So all have the same bits, wherever an element is in the tensor.
    """

    def __init__(
        self,
        store: Any,  # noqa: ANN401  one of distributed.py
        group: Any,  # noqa: ANN401  the group of NAME, see distributed.py
        device: torch.device,
        bytes_max: int,
    ) -> None:
        """Meet the other ranks through `store`, and map their memory. Raises SettingsError."""
        self._bytes_max = bytes_max
        self._group = group  # torch knows it while it is referenced
        symmetric: Any = _symmetric_memory()
        try:
            symmetric.set_group_info(NAME, group.rank(), group.size(), store)  # where an older torch looks
            self._buffer = symmetric.empty_strided_p2p((bytes_max,), (1,), torch.uint8, device)
            symmetric.rendezvous(self._buffer, NAME)
        except RuntimeError as error:
            raise SettingsError(
                "--tensor-parallel-one-shot: the GPUs of this worker cannot map each other's memory"
                f" ({str(error).splitlines()[0]}): leave it out"
            ) from error

    def takes(self, x_TN: torch.Tensor) -> bool:
        """Return whether a sum goes this way: it depends on shape and type alone, which ranks agree on."""
        return x_TN.dtype in DTYPES and x_TN.nbytes <= self._bytes_max and x_TN.nbytes % ALIGNED_BYTES == 0

    def reduce(self, x_TN: torch.Tensor) -> torch.Tensor:
        own = self._buffer[: x_TN.nbytes].view(x_TN.dtype)
        call: Any = torch.ops.symm_mem.one_shot_all_reduce_copy  # which copies the terms into `own` first
        return call(own, x_TN.contiguous().flatten(), "sum", NAME).view_as(x_TN)


def _symmetric_memory() -> Any:  # noqa: ANN401  a class of torch
    try:
        return resolve_name("torch._C._distributed_c10d:_SymmetricMemory")  # there is no public name
    except (ImportError, AttributeError) as error:
        raise SettingsError(
            "--tensor-parallel-one-shot needs a torch with symmetric memory: leave it out"
        ) from error
