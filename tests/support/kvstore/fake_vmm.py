"""A fake of kvcached's `vmm_ops` on host memory, which behaves like release 0.1.6."""

from dataclasses import dataclass, field

import torch

OUT_OF_MEMORY = "physical page allocation failed in CUDA: out of memory"
UNMAPPED, FRESH = 0xDD, 0xEE  # unmapped and newly mapped memory reads as undefined bytes


@dataclass
class FakeVmm:
    """One reservation of int8 [size]; only mapped pages keep their bytes.

    physical_pages      The pages that the device still grants, one under unmapped ranges included.
    refusal             The message of the driver when it grants no more.
    log                 The calls that changed something, in order.
    """

    physical_pages: int = 1 << 30
    refusal: str = OUT_OF_MEMORY
    page_bytes: int = 0
    mapped: set[int] = field(default_factory=set[int])  # offsets in bytes
    log: list[str] = field(default_factory=list[str])
    memory: torch.Tensor | None = None

    def init_kvcached(self, dev_str: str, page_size: int, *, contiguous_layout: bool) -> None:
        assert torch.device(dev_str).type == "cpu"
        assert contiguous_layout
        assert page_size % (2 << 20) == 0, "kvcached aborts the process"
        self.shutdown_kvcached()
        self.page_bytes = page_size
        self.log.append("init")

    def create_kv_tensors(
        self, size: int, dtype_size: int, dev_str: str, num_layers: int, num_kv_buffers: int
    ) -> list[torch.Tensor]:
        assert self.page_bytes, "create before init"
        assert (dtype_size, num_layers, num_kv_buffers) == (1, 1, 1), "the page would be a multiple"
        self._grant()
        tensor = torch.full((size,), UNMAPPED, dtype=torch.uint8, device=dev_str).view(torch.int8)
        self.memory = tensor
        return [tensor]

    def map_to_kv_tensors(self, offsets: list[int]) -> bool:
        if self.memory is None:
            return False
        new: list[int] = []
        try:
            for offset in offsets:
                self._page(offset)
                if offset not in self.mapped:
                    self._grant()
                    new.append(offset)
                    self.mapped.add(offset)
        except RuntimeError:
            self._release(new)
            raise
        for offset in new:
            self._page(offset).fill_(FRESH)
        self.log.append("map")
        return True

    def unmap_from_kv_tensors(self, offsets: list[int]) -> bool:
        if self.memory is None:
            return False
        for offset in offsets:
            self._page(offset)
        self._release([offset for offset in offsets if offset in self.mapped])
        self.log.append("unmap")
        return True

    def shutdown_kvcached(self) -> None:
        if self.memory is not None:
            self._release(list(self.mapped))
            self.memory = None
            self.physical_pages += 1
        if self.page_bytes:
            self.page_bytes = 0
            self.log.append("shutdown")

    def _page(self, offset: int) -> torch.Tensor:
        assert self.memory is not None
        if not 0 <= offset <= self.memory.numel() - self.page_bytes:
            raise RuntimeError("KV tensor page offset is outside the reserved virtual address range")
        if offset % self.page_bytes:
            raise RuntimeError("zero page unmap failed in CUDA: invalid argument")
        return self.memory.view(torch.uint8)[offset : offset + self.page_bytes]

    def _grant(self) -> None:
        if not self.physical_pages:
            raise RuntimeError(f"physical page map failed: {self.refusal}")
        self.physical_pages -= 1

    def _release(self, offsets: list[int]) -> None:
        for offset in offsets:
            self.mapped.remove(offset)
            self._page(offset).fill_(UNMAPPED)
            self.physical_pages += 1
