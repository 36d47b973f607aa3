"""The device of an engine: its default settings, errors where it is missing, and extents that it can map."""

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from benchmarks.engine.released import RELEASED

from tests.support.kvstore.fake_vmm import FakeVmm
from tests.support.workers.settings import plain_settings
from tidemill import LLM
from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.layout import layout_of
from tidemill.kvstore.memory.backing import Kvcached
from tidemill.workers.device import (
    check_ranks,
    device_of,
    device_of_rank,
    granted,
    open_backing,
)
from tidemill.workers.device_errors import is_sticky
from tidemill.workers.engine.build import build_engine, check_settings
from tidemill.workers.engine.memory_plan import checkpoint_pages, memory_of
from tidemill.workers.models.architectures.registry import ARCHITECTURES, describe
from tidemill.workers.settings import SettingsError
from tidemill.workers.sources.names import bundled

CUDA = torch.device("cuda", 0)
settings_with = partial(plain_settings, memory_bytes=1 << 30)


@pytest.mark.parametrize(
    ("changes", "variant", "backing", "page_dtype"),
    [
        ({}, "cpu", "mmap", "float32"),
        ({"kernels": "reference", "backing": "fixed"}, "reference", "fixed", "float32"),
        ({"kv_cache_dtype": "bfloat16"}, "cpu", "mmap", "bfloat16"),
        ({"device": "cuda"}, "triton", "kvcached", "bfloat16"),
        ({"device": "cuda", "kv_cache_dtype": "float32"}, "triton", "kvcached", "float32"),
        ({"device": "cuda:1", "kernels": "reference", "backing": "fixed"}, "reference", "fixed", "bfloat16"),
    ],
)
def test_defaults_of_a_device(changes: dict[str, Any], variant: str, backing: str, page_dtype: str) -> None:
    settings = settings_with(**changes)
    assert (settings.variant, settings.backing_kind, settings.page_dtype) == (variant, backing, page_dtype)


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"device": "gpu"}, "set it to cpu, cuda, or cuda:1"),
        ({"device": "cuda:"}, "set it to cpu, cuda, or cuda:1"),
        ({"device": "cuda:-1"}, "set it to cpu, cuda, or cuda:1"),
        ({"device": "cuda", "kernels": "cpu"}, "--kernels cpu .*leave it out"),
        ({"async_scheduling": True}, "--async-scheduling is for CUDA devices"),
        ({"attention_backend": "flashinfer"}, "is for --device cuda without"),
        ({"device": "cuda", "attention_backend": "flashinfer"}, "add --enforce-eager"),
        (
            {"device": "cuda", "kernels": "reference", "batch_invariant": True},
            "--batch-invariant is of --kernels triton",
        ),
        (
            {
                "device": "cuda",
                "tensor_parallel_size": 2,
                "tensor_parallel_reduce": "fast",
                "batch_invariant": True,
            },
            "set it to exact with --batch-invariant",
        ),
        ({"device": "cuda", "backing": "mmap"}, "--backing mmap .*use kvcached or fixed"),
        ({"backing": "kvcached"}, "--backing kvcached .*use mmap or fixed"),
        (
            {"device": "cuda", "tensor_parallel_size": 2, "tensor_parallel_backend": "shared-memory"},
            "shared-memory does not go with --device cuda",
        ),
        (
            {"tensor_parallel_size": 2, "tensor_parallel_backend": "nccl"},
            "nccl does not go with --device cpu",
        ),
        (
            {"device": "cuda", "tensor_parallel_size": 2, "tensor_parallel_backend": "gloo"},
            "no CUDA graph can: add --enforce-eager",
        ),
        ({"device": "cuda", "tensor_parallel_size": 2, "device_share": 0.5}, "one rank on a GPU: .*num-gpus"),
    ],
)
def test_incompatible_settings_are_refused(changes: dict[str, Any], fix: str) -> None:
    with pytest.raises(SettingsError, match=fix):
        settings_with(**changes)


def test_triton_needs_a_device() -> None:
    settings = settings_with(kernels="triton")
    with pytest.raises(SettingsError, match=r"--kernels triton .*add --device cuda"):
        check_settings(settings)
    with pytest.raises(SettingsError, match=r"--kernels triton .*add --device cuda"):
        build_engine(settings, lambda _done, _total: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_device_that_is_not_there() -> None:
    check_settings(settings_with(device="cuda", backing="fixed"))  # workers may run on other machines
    with pytest.raises(SettingsError, match=r"no CUDA device here: use --device cpu"):
        LLM("keeper", device="cuda")


def have_gpus(monkeypatch: pytest.MonkeyPatch, count: int, capability: tuple[int, int] = (9, 0)) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", Mock(return_value=capability))


def test_device_beyond_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, 2)
    assert device_of(settings_with(device="cuda")) == CUDA
    assert device_of(settings_with(device="cuda:1")) == torch.device("cuda", 1)
    with pytest.raises(SettingsError, match="--device cuda:2: the last one here is cuda:1"):
        device_of(settings_with(device="cuda:2"))


@pytest.mark.parametrize("capability", [(7, 5), (12, 0)])
def test_gpu_that_cannot_run_the_kernels_is_refused(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_gpus(monkeypatch, 1, capability)
    number = ".".join(map(str, capability))
    with pytest.raises(SettingsError, match=f"^--device cuda: .* capability {number}, .* or --device cpu$"):
        device_of(settings_with(device="cuda"))


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_ranks_have_a_device_each(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_with(device=device, tensor_parallel_size=4)
    have_gpus(monkeypatch, 4)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    first = int(device == "cuda:1")
    assert [device_of_rank(settings, rank) for rank in range(3)] == [f"cuda:{first + i}" for i in range(3)]
    if first:
        with pytest.raises(
            SettingsError, match=r"-size 4 is more than the 3 CUDA devices .*set it to 3 or less"
        ):
            check_ranks(settings)
    else:
        check_ranks(settings)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(SettingsError, match="-size 4: this build of torch has no NCCL: install"):
        check_ranks(settings)


def test_ranks_share_a_device_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_with(
        device="cuda",
        tensor_parallel_size=2,
        tensor_parallel_backend="gloo",
        enforce_eager=True,
        device_share=0.5,
    )
    have_gpus(monkeypatch, 1)
    check_ranks(settings)
    assert [device_of_rank(settings, rank) for rank in range(2)] == ["cuda:0", "cuda:0"]


def test_without_kvcached_the_other_backing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, 1, (10, 0))
    monkeypatch.setitem(sys.modules, "kvcached.vmm_ops", None)
    with pytest.raises(SettingsError, match=r"kvcached does not load .*--backing fixed"):
        open_backing(settings_with(device="cuda"), Kvcached.GRANULE_BYTES)


def test_memory_that_is_not_granted_names_the_fix() -> None:
    line = "cuda:0 has no memory left for graphs: pass --enforce-eager"
    with pytest.raises(OutOfMemory, match=line), granted(CUDA, "graphs: pass --enforce-eager"):
        raise torch.OutOfMemoryError


@pytest.mark.parametrize(
    ("error", "sticky"),
    [
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), True),
        (torch.AcceleratorError("an illegal memory access was encountered"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), False),
        (RuntimeError("the size of tensor a must match"), False),
        (ValueError("CUDA error: the text of a request"), False),
    ],
    ids=repr,
)
def test_sticky_errors_of_a_device(error: Exception, *, sticky: bool) -> None:
    assert is_sticky(error) is sticky


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"device": "cuda"}, 3264),
        ({"device": "cuda", "kv_cache_dtype": "float32"}, 1664),
        ({"device": "cuda", "checkpoint_interval": 128}, 128),
        ({}, 64),
    ],
)
def test_checkpoints_while_decoding_cost_what_their_pages_cost(changes: dict[str, Any], tokens: int) -> None:
    """Qwen3-Next-80B-A3B has states of 75 MiB and pages of 1.5 MiB."""
    settings = settings_with(**changes)
    specs = ARCHITECTURES["Qwen3NextForCausalLM"].parse(RELEASED["Qwen3-Next-80B-A3B"]).specs
    assert checkpoint_pages(settings, layout_of(specs, 64, settings.page_dtype)) * 64 == tokens


def test_arena_of_a_device_waits_for_the_newest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pieces divide the extent, and the end of the newest step is that of the runner."""
    monkeypatch.setattr("tidemill.workers.device.device_of", Mock(return_value=torch.device("cpu")))
    vmm = FakeVmm()
    monkeypatch.setattr("tidemill.kvstore.memory.backing._installed_vmm_ops", lambda: vmm)
    newest: Any = SimpleNamespace(query=lambda: False, synchronize=lambda: vmm.log.append("waited"))
    backing = open_backing(settings_with(device="cuda"), 3 * (6 << 20), 6 << 20, lambda: newest)
    assert vmm.page_bytes == 6 << 20
    backing.map(0, 6 << 20)
    backing.unmap(0, 6 << 20)
    assert vmm.log == ["init", "map", "waited", "unmap"]


@pytest.mark.parametrize("page_tokens", [1, 16, 48, 64])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_extents_are_whole_granules_of_kvcached(page_tokens: int, kv_dtype: str) -> None:
    layers, max_length = describe(bundled()["keeper"])
    settings = settings_with(
        device="cuda", page_size=page_tokens, kv_cache_dtype=kv_dtype, memory_bytes=8 << 30, max_model_len=512
    )
    memory = memory_of(settings, layers, max_length)
    assert not memory.layout.extent_bytes % Kvcached.GRANULE_BYTES
    assert not memory.layout.extent_bytes % memory.layout.state_stride_bytes
    assert memory.max_model_len == 512


def test_memory_taken_at_the_start_reserves_nothing_more() -> None:
    layers, max_length = describe(bundled()["keeper"])
    for backing, times in (("fixed", 1), ("kvcached", 4)):
        settings = settings_with(device="cuda", backing=backing, memory_max_bytes=4 << 30)
        memory = memory_of(settings, layers, max_length)
        assert abs(memory.reserved - times * memory.share) < times
