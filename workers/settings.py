"""The settings of one engine: plain data, read once, without torch."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from pydantic.dataclasses import dataclass as checked_dataclass

from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.layout import KvDtype, StateDtype
from tidemill.kvstore.sizes import parse_bytes
from tidemill.workers.options import Backend, Count, EngineConfig, KvEventsConfig, Purpose
from tidemill.workers.pickled_by_name import PickledByName
from tidemill.workers.sources.names import ModelSource

MEMORY_BYTES = 1 << 30
"""The default memory of pages and states on CPUs."""

STEP, STEP_CUDA = (512, 128), (8192, 256)
"""The default tokens and rows of a step, on CPUs and on CUDA devices."""

ITL_TARGET_S, ITL_TARGET_CUDA_S = 0.1, 0.05
"""The default times of a step with prompts beside streams, on CPUs and on CUDA devices."""


class SettingsError(TidemillError):
    """A setting has no meaning; the message names it."""


@checked_dataclass(frozen=True, kw_only=True)
class KvEventSettings(KvEventsConfig, PickledByName):
    """The publication of a worker's KV events over ZMQ, in vLLM's terms.

    `rank` is a number of the worker, which no other worker of the cluster has: it is added to the ports
    that the worker binds.
    """

    rank: int = 0
    stride: int = 1  # workers with the same role and model have every `stride`-th rank

    def of_worker(self, name: str) -> "KvEventSettings":
        """Return the settings of the worker `name`, from those of its group: `decode-2` is the third."""
        return replace(self, rank=self.rank + self.stride * int(name.rpartition("-")[2]))


@dataclass(frozen=True, kw_only=True)
class HostedSettings(PickledByName):
    """The settings of any engine, which its worker decides: model, store, device, memory, ranks, threads."""

    model_folder: Path
    model_source: ModelSource | None = None  # of a model that each node downloads; None: the folder is there
    max_model_len: Count | None = None
    cache_folder: Path  # for compiled kernels
    store_url: str
    store_secret_file: Path | None = None  # seals stored objects: all workers of a store have the same one
    device: str = "cpu"  # or cuda, or cuda:1
    device_share: float = 1.0  # the part of a CUDA device that this worker has; others have the rest
    memory_bytes: int | None = None  # None: MEMORY_BYTES, on CUDA what the device has left
    memory_max_bytes: int | None = None  # address space to grow into; None: memory_bytes
    memory_floor_bytes: int | None = None  # the least budget; at least the need of one request
    threads: Count = 1
    tensor_parallel_size: Count = 1  # ranks of this worker
    tensor_parallel_nodes: Count = 1  # that its ranks may be spread over, evenly
    tensor_parallel_sizes: tuple[int, ...] = ()  # of the other workers that use this store
    kv_events: KvEventSettings | None = None  # None: no events

    def of_worker(self, name: str, host: str = "127.0.0.1") -> Self:  # noqa: ARG002 - for engines with ports
        """Return the settings of the worker `name`, from those of its group: `decode-2` is the third. Others
        reach it at `host`. Raises SettingsError."""
        return self if self.kv_events is None else replace(self, kv_events=self.kv_events.of_worker(name))

    @property
    def on_cuda(self) -> bool:
        return self.device != "cpu"

    @property
    def group_sizes(self) -> frozenset[int]:
        """The group sizes of all workers of this store: they decide how it cuts pages and states."""
        return frozenset((self.tensor_parallel_size, *self.tensor_parallel_sizes))

    @property
    def ranks_per_node(self) -> int:
        return self.tensor_parallel_size // self.tensor_parallel_nodes


@checked_dataclass(frozen=True, kw_only=True)
class EngineSettings(HostedSettings, EngineConfig):
    """The settings of our engine: what a worker decides, and the engine's options."""

    memory_broker: bool = False  # True: start with the least budget, because a broker assigns the rest

    @property
    def purpose(self) -> Purpose:
        return Purpose(self.runner, self.convert)

    @property
    def variant(self) -> Literal["cpu", "triton", "reference"]:
        """The variant of the operators."""
        return self.kernels or ("triton" if self.on_cuda else "cpu")

    @property
    def page_dtype(self) -> KvDtype:
        """The format of pages, once `compute_dtype` is known."""
        match self.kv_cache_dtype:
            case "auto":
                return "bfloat16" if self.on_cuda else self.compute_dtype or "float32"
            case "fp8_e4m3":
                return "fp8"
            case given:
                return given

    @property
    def saved_dtype(self) -> StateDtype:
        """The type of recurrent states in checkpoints."""
        return self.state_dtype if self.checkpoint_dtype == "auto" else self.checkpoint_dtype

    @property
    def backing_kind(self) -> Literal["fixed", "mmap", "kvcached"]:
        return self.backing or ("kvcached" if self.on_cuda else "mmap")

    @property
    def step_target_s(self) -> float:
        """The time that a step with prompts beside streams should take; 0: no limit."""
        default_s = ITL_TARGET_CUDA_S if self.on_cuda else ITL_TARGET_S
        return default_s if self.itl_target is None else self.itl_target

    @property
    def backend(self) -> Backend:
        """The library of the exchange between ranks."""
        on_host = "shared-memory" if self.tensor_parallel_nodes == 1 else "gloo"
        return self.tensor_parallel_backend or ("nccl" if self.on_cuda else on_host)

    @property
    def one_shot_bytes(self) -> int:
        """The size of the largest sum that GPUs of one node add up without NCCL."""
        return parse_bytes(self.tensor_parallel_one_shot or "0")

    @property
    def sums(self) -> bool:
        """Return whether ranks add up terms: a group of one rank has nothing to add."""
        default = "fast" if self.on_cuda and not self.batch_invariant else "exact"
        return max(self.group_sizes) > 1 and (self.tensor_parallel_reduce or default) == "fast"

    @property
    def by_expert(self) -> bool:
        """Return whether ranks have whole experts."""
        return self.enable_expert_parallel and self.sums

    @property
    def sums_namespace(self) -> str:
        """Return the part of a page's namespace for the order in which its ranks have added; empty for the
        bits of one rank."""
        if not self.sums:
            return ""
        ranks = "any" if self.allow_inexact_groups else self.tensor_parallel_size
        return f"/fast {ranks}{' by expert' if self.by_expert else ''}"

    def __post_init__(self) -> None:
        """Raises SettingsError."""
        if self.speculative_method == "mtp" and not self.num_speculative_tokens:
            raise SettingsError(
                "--speculative-method mtp needs --num-speculative-tokens: set it to 1 or more"
            )
        if (self.state_dtype, self.checkpoint_dtype) == ("bfloat16", "float32"):
            raise SettingsError(
                "--checkpoint-dtype float32 is wider than states in bfloat16: leave it out, or add"
                " --state-dtype float32"
            )
        interval = self.checkpoint_interval
        if interval is not None and interval % self.page_size:
            raise SettingsError(
                f"--checkpoint-interval is {interval} tokens: set it to a multiple of the page size,"
                f" {self.page_size}"
            )
        self._check_device()
        self._check_groups()

    def _check_groups(self) -> None:
        """Check the nodes of ranks, and their exchange."""
        nodes, size = self.tensor_parallel_nodes, self.tensor_parallel_size
        if size % nodes:
            raise SettingsError(
                f"--tensor-parallel-nodes is {nodes}: each has as many of the {size} ranks as the others, so"
                f" set it to a divisor of --tensor-parallel-size"
            )
        if self.one_shot_bytes and not (self.sums and self.backend == "nccl" and nodes == 1):
            raise SettingsError(
                "--tensor-parallel-one-shot is for ranks on the GPUs of one node that sum fast over NCCL:"
                " leave it out"
            )
        if max(self.group_sizes) == 1:
            return
        if self.batch_invariant and self.sums:
            raise SettingsError(
                "--tensor-parallel-reduce fast adds up in an order that depends on the size of a step: set it"
                " to exact with --batch-invariant"
            )
        if self.enable_expert_parallel and not self.sums:
            raise SettingsError(
                "--enable-expert-parallel adds up what the experts of all ranks compute: add"
                " --tensor-parallel-reduce fast"
            )
        if self.sums and len(self.group_sizes) > 1 and not self.allow_inexact_groups:
            sizes = " and ".join(map(str, sorted(self.group_sizes)))
            raise SettingsError(
                f"--tensor-parallel-reduce fast: groups of {sizes} ranks round in different ways and share no"
                " pages: set one size, or --tensor-parallel-reduce exact, or add --allow-inexact-groups"
            )

    def _check_device(self) -> None:
        """Check settings against each other. For the presence of the device see workers/device.py."""
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise SettingsError(f"--device is {self.device}: set it to cpu, cuda, or cuda:1")
        named = f"--device {self.device}"
        if self.async_scheduling and not self.on_cuda:
            raise SettingsError("--async-scheduling is for CUDA devices: leave it out with --device cpu")
        if self.numa_bind and not self.on_cuda and max(self.group_sizes) == 1:
            raise SettingsError(
                "--numa-bind is for CUDA devices and for ranks on CPUs: leave it out, or run the server under"
                " numactl"
            )
        self._check_numbers()
        if self.on_cuda and self.variant == "cpu":
            raise SettingsError(f"--kernels cpu computes in host memory: leave it out with {named}")
        if self.on_cuda and self.backing_kind == "mmap":
            raise SettingsError(f"--backing mmap is host memory: use kvcached or fixed with {named}")
        if not self.on_cuda and self.backing_kind == "kvcached":
            raise SettingsError(f"--backing kvcached is CUDA memory: use mmap or fixed with {named}")
        if self.tensor_parallel_size > 1:
            self._check_backend(named)

    def _check_numbers(self) -> None:
        """Check the options that choose the order of sums."""
        if self.batch_invariant and self.on_cuda and self.variant != "triton":
            raise SettingsError("--batch-invariant is of --kernels triton: leave out --kernels")
        if self.attention_backend == "flashinfer":
            if self.variant != "triton" or self.batch_invariant:
                raise SettingsError(
                    "--attention-backend flashinfer is for --device cuda without --kernels and"
                    " --batch-invariant: leave one out"
                )
            if not self.enforce_eager:
                raise SettingsError(
                    "--attention-backend flashinfer plans each step on the host, which no CUDA graph can: add"
                    " --enforce-eager, or leave it out"
                )

    def _check_backend(self, named: str) -> None:
        """Check the exchange of several ranks on the device that is `named`."""
        if self.backend == "shared-memory" and self.tensor_parallel_nodes > 1:
            raise SettingsError(
                "--tensor-parallel-backend shared-memory is for ranks on one node: leave it out with"
                " --tensor-parallel-nodes"
            )
        if self.on_cuda != (self.backend == "nccl") and self.backend != "gloo":
            raise SettingsError(
                f"--tensor-parallel-backend {self.backend} does not go with {named}: leave it out"
            )
        if self.on_cuda and self.backend == "gloo" and not self.enforce_eager:
            raise SettingsError(
                "--tensor-parallel-backend gloo exchanges through the host, which no CUDA graph can:"
                " add --enforce-eager, or leave it out"
            )
        if self.backend == "nccl" and self.device_share < 1:
            raise SettingsError(
                "NCCL takes one rank on a GPU: set --num-gpus to 1, or add --tensor-parallel-backend gloo"
                " --enforce-eager"
            )
