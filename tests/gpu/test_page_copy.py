# pyright: basic
"""`page_copy` compiled for a real device: parity with its definition, and the share of a plain copy."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.support.kernels.foreign import CACHES, Case, Memory
from tidemill.kernels.dispatch import page_copy
from tidemill.kernels.page_copy import reference
from tidemill.kernels.page_copy.planes import Direction, PageCopy, Plane

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or find_spec("triton") is None, reason="needs a CUDA device and triton"
    ),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),  # a copy computes nothing
]

DIRECTIONS: tuple[Direction, ...] = ("export", "import")
CASES = (
    Case(tokens=1, page_tokens=1, block_tokens=1, heads=1, dims=(1,)),
    Case(tokens=1000, page_tokens=64, block_tokens=16, heads=2, dims=(128, 256), dtype=torch.bfloat16),
    Case(tokens=333, page_tokens=16, block_tokens=64, heads=8, dims=(128,), dtype=torch.float32),
    Case(tokens=100, page_tokens=12, block_tokens=5, heads=3, dims=(7, 1), dtype=torch.bfloat16),
    Case(tokens=500, page_tokens=64, block_tokens=64, heads=1, dims=(576, 576), dtype=torch.bfloat16),
    Case(tokens=200, page_tokens=64, block_tokens=16, heads=4, dims=(64, 63), dtype=torch.uint8),
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> PageCopy:
    return page_copy("triton", Path(tmp_path_factory.mktemp("kernels")))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shuffled", [False, True], ids=["blocks", "tokens"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_definition(
    compiled: PageCopy, case: Case, cache: str, direction: Direction, *, shuffled: bool
) -> None:
    case = Case(**{**vars(case), "cache": cache})
    host, device = Memory(case, shuffled=shuffled), Memory(case, device="cuda", shuffled=shuffled)
    reference.page_copy(host.planes, host.page_N, host.slot_T, direction)
    compiled(device.planes, device.page_N, device.slot_T, direction)
    assert device.is_like(host)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_offsets_beyond_32_bits(compiled: PageCopy, direction: Direction) -> None:
    """Both pages and both blocks lie more than 2^31 elements apart, in 17 GB."""
    far = (1 << 31) + 8
    if torch.cuda.mem_get_info(0)[0] < 5 * far * 2:
        pytest.skip("needs 22 GB of device memory")
    ours, theirs = (torch.empty(2 * far, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    sides = [side.as_strided((2, 2, 4, 16), (far, 64, 16, 1)) for side in (ours, theirs)]
    source, target = sides if direction == "export" else sides[::-1]
    source.copy_(torch.arange(256, device="cuda").view(source.shape))
    page_N = torch.tensor([1, 0], dtype=torch.int32, device="cuda")
    compiled([Plane(*sides)], page_N, torch.arange(8, device="cuda"), direction)
    assert torch.equal(target, source.flip(0))
