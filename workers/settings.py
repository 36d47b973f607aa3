"""The settings of one engine: plain data, read once, without torch."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tidemill.kernels.shared.compute_dtype import ComputeDtype
from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.layout import KvDtype
from tidemill.kvstore.memory.recompute_cost import Policy
from tidemill.workers.pickled_by_name import PickledByName
from tidemill.workers.sources.names import ModelSource

CheckpointStrategy = Literal["none", "double", "lazy"]
"""The checkpoint at each boundary of the interval while decoding. "none": there is none, and a sequence holds
one state. "double": it replaces the one before it, in a slot that is kept ready (3 states). "lazy": it
borrows a slot only then (2 states)."""

SpeculativeMethod = Literal["auto", "ngram", "mtp"]
"""The source of guesses: earlier occurrences of the last tokens ("ngram"), or the model's own prediction head
("mtp"), for which every worker keeps one more layer in its pages. "auto" is the head if the model has one."""

LoadFormat = Literal["auto", "dummy"]
"""The weights: those of the folder ("auto"), or random ones for its config.json ("dummy")."""

Reduce = Literal["exact", "fast"]
"""The exchange of the ranks of a group. "exact": all-gathers of whole columns, with the bits of one rank.
"fast": one all-reduce of sums for each attention and each MLP; the last bits depend on the number of
ranks."""

Backend = Literal["shared-memory", "gloo", "nccl"]
"""The library of that exchange: host memory, torch's gloo through the host, or NCCL between GPUs."""

MEMORY_BYTES = 1 << 30
"""The default memory of pages and states on CPUs."""

STEP, STEP_CUDA = (512, 128), (8192, 256)
"""The default tokens and rows of a step, on CPUs and on CUDA devices."""

ITL_TARGET_S, ITL_TARGET_CUDA_S = 0.1, 0.05
"""The default times of a step with prompts beside streams, on CPUs and on CUDA devices."""

DRAFTS_MAX = 16
"""The limit of guesses: in a hybrid each costs a state until it is confirmed, and a row of logits."""


class SettingsError(TidemillError):
    """A setting has no meaning; the message names it."""


KV_EVENT_ENDPOINT = r"(tcp://[^\s/]+:[0-9]{1,5}|ipc://\S+)"
"""The endpoints of KV events: those of ZMQ that other processes can reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventSettings(PickledByName):
    """The publication of KV events over ZMQ, in vLLM's terms.

    `rank` is a number of the worker, which no other worker of the cluster has: it is added to the ports
    that the worker binds.
    """

    endpoint: str
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000  # batches that a replay can return
    hwm: int = 100_000  # batches that wait for one subscriber
    queue_max: int = 100_000  # batches that wait to be sent
    topic: str = ""
    rank: int = 0
    stride: int = 1  # workers with the same role and model have every `stride`-th rank

    def of_worker(self, name: str) -> "KvEventSettings":
        """Return the settings of the worker `name`, from those of its group: `decode-2` is the third."""
        return replace(self, rank=self.rank + self.stride * int(name.rpartition("-")[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(PickledByName):
    """The settings of one engine. `step_tokens_max` is the token budget of a step, `rows_max` its rows."""

    model_folder: Path
    model_source: ModelSource | None = None  # of a model that each node downloads; None: the folder is there
    cache_folder: Path  # for compiled kernels
    store_url: str
    store_secret_file: Path | None = None  # seals stored objects: all workers of a store have the same one
    load_format: LoadFormat = "auto"
    page_tokens: int = 64
    compute_dtype: ComputeDtype | None = None  # of products; None: that of the weights
    kv_dtype: KvDtype | None = None  # of pages; None: compute_dtype, on CUDA bfloat16
    state_dtype: KvDtype = "float32"  # of recurrent states
    device: str = "cpu"  # or cuda, or cuda:1
    backing: Literal["fixed", "mmap", "kvcached"] | None = None  # None: mmap, on CUDA kvcached
    memory_bytes: int | None = None  # None: MEMORY_BYTES, on CUDA what the device has left
    memory_max_bytes: int | None = None  # address space to grow into; None: memory_bytes
    memory_floor_bytes: int | None = (
        None  # the least budget; at least what one request of max_model_len needs
    )
    starts_at_floor: bool = False  # a memory broker assigns the rest
    gpu_memory_utilization: float = 0.9  # of the worker's share of a CUDA device: weights and all else
    device_share: float = 1.0  # the part of a CUDA device that this worker has; others have the rest
    eviction: Policy = "value"
    checkpoints_per_path: int = 16
    checkpoint_strategy: CheckpointStrategy = "lazy"
    checkpoint_interval: int | None = None  # tokens between checkpoints while decoding; None: a page
    kernels: Literal["cpu", "triton", "reference"] | None = None  # None: cpu, on CUDA triton
    enforce_eager: bool = False  # decode steps without CUDA graphs, or recordings of CPU steps
    threads: int = 1
    step_tokens_max: int | None = None  # None: by the device
    rows_max: int | None = None  # None: by the device
    itl_target_s: float | None = None  # of a step beside streams; None: by the device, 0: no limit
    max_model_len: int | None = None
    overlap: bool = True  # launch the next step before the tokens of this one are read
    async_scheduling: bool = False  # on CUDA: make the inputs of the next step while this one runs
    numa_bind: bool = False  # keep each rank on the NUMA node of its GPU, ranks on CPUs on one each
    drafts_max: int = 0  # guessed tokens of a row; 0: no speculation
    speculative_method: SpeculativeMethod = "auto"
    tensor_parallel_size: int = 1  # ranks of this worker
    tensor_parallel_nodes: int = 1  # that its ranks may be spread over, evenly
    tensor_parallel_sizes: tuple[int, ...] = ()  # of the other workers that use this store
    tensor_parallel_reduce: Reduce | None = None  # None: exact, on CUDA fast
    tensor_parallel_backend: Backend | None = None  # None: shared-memory, over nodes gloo, on CUDA nccl
    tensor_parallel_interface: str | None = None  # of it between nodes; None: that of the node's address
    one_shot_bytes: int = 0  # of the largest sum that GPUs of one node add up without NCCL
    allow_inexact_groups: bool = False  # fast groups of different sizes read each other's pages
    enable_expert_parallel: bool = False  # ranks have whole experts
    kv_events: KvEventSettings | None = None  # None: no events

    @property
    def on_cuda(self) -> bool:
        return self.device != "cpu"

    @property
    def variant(self) -> Literal["cpu", "triton", "reference"]:
        """The variant of the operators."""
        return self.kernels or ("triton" if self.on_cuda else "cpu")

    @property
    def page_dtype(self) -> KvDtype:
        """The dtype of pages, once `compute_dtype` is known."""
        return self.kv_dtype or ("bfloat16" if self.on_cuda else self.compute_dtype or "float32")

    @property
    def backing_kind(self) -> Literal["fixed", "mmap", "kvcached"]:
        return self.backing or ("kvcached" if self.on_cuda else "mmap")

    @property
    def step_target_s(self) -> float:
        """The time that a step with prompts beside streams should take; 0: no limit."""
        default_s = ITL_TARGET_CUDA_S if self.on_cuda else ITL_TARGET_S
        return default_s if self.itl_target_s is None else self.itl_target_s

    @property
    def group_sizes(self) -> frozenset[int]:
        """The group sizes of all workers of this store: they decide how it cuts pages and states."""
        return frozenset((self.tensor_parallel_size, *self.tensor_parallel_sizes))

    @property
    def backend(self) -> Backend:
        """The library of the exchange between ranks."""
        on_host = "shared-memory" if self.tensor_parallel_nodes == 1 else "gloo"
        return self.tensor_parallel_backend or ("nccl" if self.on_cuda else on_host)

    @property
    def ranks_per_node(self) -> int:
        return self.tensor_parallel_size // self.tensor_parallel_nodes

    @property
    def sums(self) -> bool:
        """Return whether ranks add up terms: a group of one rank has nothing to add."""
        default = "fast" if self.on_cuda else "exact"
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
        for flag, value in (
            ("--page-size", self.page_tokens),
            ("--threads", self.threads),
            ("--max-num-batched-tokens", self.step_tokens_max),
            ("--max-num-seqs", self.rows_max),
            ("--max-model-len", self.max_model_len),
            ("--checkpoints-per-path", self.checkpoints_per_path),
            ("--tensor-parallel-size", self.tensor_parallel_size),
            ("--tensor-parallel-nodes", self.tensor_parallel_nodes),
        ):
            if value is not None and value < 1:
                raise SettingsError(f"{flag} is {value}: set it to 1 or more")
        if self.step_target_s < 0:
            raise SettingsError(f"--itl-target is {self.itl_target_s} s: set it to 0 or more")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise SettingsError(
                f"--gpu-memory-utilization is {self.gpu_memory_utilization}: set it above 0, to 1 or less"
            )
        if not 0 <= self.drafts_max <= DRAFTS_MAX:
            raise SettingsError(f"--num-speculative-tokens is {self.drafts_max}: set it to 0 to {DRAFTS_MAX}")
        if self.speculative_method == "mtp" and not self.drafts_max:
            raise SettingsError(
                "--speculative-method mtp needs --num-speculative-tokens: set it to 1 or more"
            )
        interval = self.checkpoint_interval
        if interval is not None and (interval < 1 or interval % self.page_tokens):
            raise SettingsError(
                f"--checkpoint-interval is {interval} tokens: set it to a multiple of the page size,"
                f" {self.page_tokens}"
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
        if self.on_cuda and self.variant == "cpu":
            raise SettingsError(f"--kernels cpu computes in host memory: leave it out with {named}")
        if self.on_cuda and self.backing_kind == "mmap":
            raise SettingsError(f"--backing mmap is host memory: use kvcached or fixed with {named}")
        if not self.on_cuda and self.backing_kind == "kvcached":
            raise SettingsError(f"--backing kvcached is CUDA memory: use mmap or fixed with {named}")
        if self.tensor_parallel_size > 1:
            self._check_backend(named)

    def _check_backend(self, named: str) -> None:
        """Check the exchange of several ranks on the device that is `named`."""
        if self.async_scheduling:
            raise SettingsError("--async-scheduling is for workers of one rank: leave it out")
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
