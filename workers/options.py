"""Every option of the engine, declared once: type, bounds, default, meaning, and name on the command line.

The configuration file has them as `models[].engine`, and EngineSettings as its own fields, by the same names.
The text below an option appears in the schema, in docs/configuration.md and in `tidemill serve --help`.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.dataclasses import dataclass as checked_dataclass

from tidemill.kernels.shared.compute_dtype import ComputeDtype
from tidemill.kernels.shared.quantization import Quantization
from tidemill.kvstore.layout import StateDtype
from tidemill.kvstore.memory.recompute_cost import Policy
from tidemill.kvstore.sizes import parse_bytes
from tidemill.workers.messages import Role

CheckpointStrategy = Literal["none", "double", "lazy"]
"""The checkpoint at each boundary of the interval while decoding. "none": there is none, and a sequence holds
one state. "double": it replaces the one before it, in a slot that is kept ready (3 states). "lazy": it
borrows a slot only then (2 states)."""

SpeculativeMethod = Literal["auto", "ngram", "mtp"]
"""The source of guesses: earlier occurrences of the last tokens ("ngram"), or the model's own prediction head
("mtp"), for which every worker keeps one more layer in its pages. "auto" is the head if the model has one."""

Runner = Literal["auto", "generate", "pooling"]
"""The work of a model: answers ("generate"), or embeddings and scores ("pooling")."""

Convert = Literal["auto", "none", "embed", "classify"]
"""The result of a model that pools. "embed": the hidden state after the last token. "classify": how likely
"yes" is as the next token rather than "no", or the label of a sequence classifier. "none": what the folder is
made for."""


class Purpose(NamedTuple):
    """The purpose of a model; "auto" is what its folder is made for."""

    runner: Runner = "auto"
    convert: Convert = "auto"


ANY = Purpose()

KvCacheDtype = Literal["auto", "float32", "bfloat16", "fp8", "fp8_e4m3", "fp8_per_token_head"]
"""The format of pages by the names of vLLM: "fp8" is "fp8_e4m3", and "auto" is the type of products."""

CheckpointDtype = Literal["auto", "float32", "bfloat16"]
"""The format of recurrent states in checkpoints: "auto" is that of running ones."""

LoadFormat = Literal["auto", "dummy"]
"""The weights: those of the folder ("auto"), or random ones for its config.json ("dummy")."""

Reduce = Literal["exact", "fast"]
"""The exchange of the ranks of a group. "exact": all-gathers of whole columns, with the bits of one rank.
"fast": one all-reduce of sums for each attention and each MLP; the last bits depend on the number of
ranks."""

Backend = Literal["shared-memory", "gloo", "nccl"]
"""The library of that exchange: host memory, torch's gloo through the host, or NCCL between GPUs."""

DRAFTS_MAX = 16
"""The limit of guesses: in a hybrid each costs a state until it is confirmed, and a row of logits."""

Section = Literal[
    "endpoint",
    "model",
    "workers",
    "device",
    "memory",
    "cluster",
    "telemetry",
    "security",
    "security between the cluster's processes",
]
"""The sections of `tidemill serve --help`, in their order."""


@dataclass(frozen=True, slots=True)
class Flag:
    """The name of a key on the command line. `text` replaces the key's text there. A flag of a role sets the
    key only in groups of that role."""

    section: Section
    option: str
    metavar: str | None = None
    text: str | None = None
    short: str | None = None
    role: Role | None = None


SIZE = r"^\s*[0-9]+(\.[0-9]+)?\s*([kmgtKMGT]([iI]?[bB]?)|[bB])?\s*$"
KV_EVENT_ENDPOINT = r"(tcp://[^\s/]+:[0-9]{1,5}|ipc://\S+)"
"""The endpoints of KV events: those of ZMQ that other processes can reach."""

DURATION = r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s)?\s*$"


def _size(value: object) -> object:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str):
        parse_bytes(text)  # raises ValueError
    return text


def _duration(value: object) -> object:
    """Return seconds, from a number of them or a text like 50ms or 0.05s."""
    if not isinstance(value, str):
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
    match = re.fullmatch(DURATION, value)
    if match is None:
        raise ValueError(f"time {value!r} is not a duration: write it like 50ms, 0.05s or 0.05")
    return float(match[1]) * (1e-3 if match[2] == "ms" else 1.0)


def _check_endpoint(endpoint: str) -> str:
    if re.fullmatch(KV_EVENT_ENDPOINT, endpoint) is None:
        raise ValueError(
            f"is {endpoint!r}: write it like tcp://*:5557, tcp://collector:5557 or ipc:///tmp/kv"
        )
    return endpoint


ENGINE = r"^(tidemill|vllm(=https?://[^\s,]+(,https?://[^\s,]+)*)?)$"
"""The engines: our own, a vLLM of each worker, or the vLLMs at some URLs."""

Switch = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1)]
Text = Annotated[str, Field(min_length=1)]
Endpoint = Annotated[str, AfterValidator(_check_endpoint)]
Size = Annotated[
    str,
    BeforeValidator(_size),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": SIZE}, {"type": "integer", "minimum": 0}]}),
]
Duration = Annotated[
    float,
    Field(strict=True, ge=0),
    BeforeValidator(_duration),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": DURATION}, {"type": "number", "minimum": 0}]}),
]


OPTIONS = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


@checked_dataclass(frozen=True, kw_only=True, config=OPTIONS)
class KvEventsConfig:
    """The KV events of every worker, for routers outside the cluster: docs/kv_events.md."""

    enable_kv_cache_events: Switch = False
    """publish which pages and checkpoints each worker holds; needs the extra `events`"""
    publisher: Literal["null", "zmq"] = "zmq"
    """null publishes nothing"""
    endpoint: Endpoint = "tcp://127.0.0.1:5557"
    """address of the first worker: `tcp://*:5557` listens at all addresses of its machine, and the address of
    another machine is connected to"""
    replay_endpoint: Endpoint | None = None
    """address where the first worker listens for requests for past batches"""
    buffer_steps: Count = 10_000
    """maximum number of past batches that a worker keeps for replays"""
    hwm: Count = 100_000
    """maximum number of batches that wait for one slow subscriber"""
    max_queue_size: Count = 100_000
    """maximum number of batches that wait to be sent; when there are more, all are dropped, and the next one
    has everything that the worker holds"""
    topic: str = ""
    """topic of the messages"""


@checked_dataclass(frozen=True, kw_only=True, config=OPTIONS)
class AdapterConfig:
    """The engine of all workers of a model, and the settings of one that is not our own: docs/vllm.md."""

    engine: Annotated[str, Field(pattern=ENGINE), Flag("workers", "--engine", "NAME")] = "tidemill"
    """engine of the workers: tidemill, vllm for a server of its own in each worker, or vllm=URL,URL for
    servers that others run, with a worker for each"""
    args: Annotated[str, Flag("workers", "--engine-args", "ARGS")] = ""
    """arguments of each `vllm serve`, after those that Tidemill sets: --max-num-seqs 64 --dtype float16"""
    python: Annotated[Text | None, Flag("workers", "--engine-python", "PATH")] = None
    """python of the environment that has vLLM, on every node (the one that Tidemill runs in)"""

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers that others run."""
        return tuple(url.rstrip("/") for url in self.engine.partition("=")[2].split(",") if url)

    @property
    def is_own(self) -> bool:
        return self.engine == "tidemill"


@checked_dataclass(frozen=True, kw_only=True, config=OPTIONS)
class EngineConfig:
    """The settings of all workers of a model."""

    runner: Annotated[Runner, Flag("workers", "--runner")] = "auto"
    """work of the model: generate answers, or pooling for embeddings and scores; auto is pooling for folders
    of sentence-transformers and sequence classifiers"""
    convert: Annotated[Convert, Flag("workers", "--convert")] = "auto"
    """result of a model that pools: embed is the hidden state after the last token, classify the score of
    "yes" against "no" or of a classifier; auto is embed unless it is a classifier"""
    load_format: Annotated[LoadFormat, Flag("workers", "--load-format")] = "auto"
    """weights: auto reads them; dummy draws random ones for the config.json, to test speed and memory"""
    quantization: Annotated[Quantization | None, Flag("workers", "--quantization")] = None
    """quantise weights in floats while they are read; fp8, int8, w8a8 and int4 (in groups of 32 columns) have
    embedding and head in 8 bits, the others, of vLLM and SGLang, in floats; w8a8 multiplies INT8 by INT8
    (leave weights as they are)"""
    page_size: Annotated[Count, Flag("workers", "--page-size", "TOKENS")] = 64
    """tokens per page"""
    page_slices: Annotated[Count, Flag("workers", "--page-slices", "N")] = 1
    """objects of the store for a page, each of some layers; above 1 a prompt that has a worker to itself
    starts when the first is fetched, while the others arrive (docs/store.md)"""
    compute_dtype: Annotated[ComputeDtype | None, Flag("workers", "--compute-dtype")] = None
    """data type of factors; sums are float32 (float32 for weights in float32, on CPU also float16, else
    bfloat16)"""
    kv_cache_dtype: Annotated[KvCacheDtype, Flag("workers", "--kv-cache-dtype")] = "auto"
    """data type of pages; auto is that of products, and bfloat16 if workers of the model have a CUDA device;
    fp8 (fp8_e4m3) has the scales of the folder, or 1, fp8_per_token_head one for each token of a head"""
    state_dtype: Annotated[StateDtype, Flag("workers", "--state-dtype")] = "float32"
    """data type of recurrent states of linear attention; bfloat16 halves them, in steps and checkpoints, and
    rounds a state after each token"""
    checkpoint_dtype: Annotated[CheckpointDtype, Flag("workers", "--checkpoint-dtype")] = "auto"
    """data type of recurrent states in checkpoints; auto is that of states; bfloat16 beside states in float32
    halves checkpoints, and rounds a state at each multiple of the page size"""
    max_num_seqs: Annotated[Count | None, Flag("workers", "--max-num-seqs", "N")] = None
    """maximum number of rows in a step (128; on CUDA 256)"""
    max_num_batched_tokens: Annotated[Count | None, Flag("workers", "--max-num-batched-tokens", "N")] = None
    """maximum number of tokens in a step (512; on CUDA 8192)"""
    itl_target: Annotated[Duration | None, Flag("workers", "--itl-target", "TIME")] = None
    """target for the time of a step with prompts beside streams, for example 50ms; at least twice a step
    without prompts; 0 for no limit (100ms; on CUDA 50ms)"""
    num_speculative_tokens: Annotated[
        int, Field(strict=True, ge=0, le=DRAFTS_MAX), Flag("workers", "--num-speculative-tokens", "N")
    ] = 0
    """draft tokens per row and step; they are verified, so the answers stay the same (on CUDA but for the
    rounding of sums: docs/gpu.md)"""
    speculative_method: Annotated[SpeculativeMethod, Flag("workers", "--speculative-method")] = "auto"
    """source of draft tokens: ngram searches the text, mtp is the model's head, auto is mtp if it has one"""
    tensor_parallel_reduce: Annotated[Reduce | None, Flag("workers", "--tensor-parallel-reduce")] = None
    """exchange between the ranks of a worker: exact gathers columns and has the bits of one rank; fast has
    two all-reduces a layer, and its last bits depend on the number of ranks (exact; on CUDA fast)"""
    tensor_parallel_backend: Annotated[Backend | None, Flag("workers", "--tensor-parallel-backend")] = None
    """library of this exchange; gloo goes through the host (shared-memory; over nodes gloo; on CUDA nccl)"""
    tensor_parallel_one_shot: Annotated[
        Size | None, Flag("workers", "--tensor-parallel-one-shot", "SIZE")
    ] = None
    """with fast, over NCCL on one node: sums of up to this size are one launch over memory that the GPUs map
    from each other, for example 256KiB; no device has run it yet (0)"""
    tensor_parallel_interface: Annotated[
        Text | None, Flag("workers", "--tensor-parallel-interface", "NAME")
    ] = None
    """network interface of this exchange between nodes (that of the node's address in Ray)"""
    allow_inexact_groups: Annotated[Switch, Flag("workers", "--allow-inexact-groups")] = False
    """with fast: workers of different numbers of ranks read each other's pages, and round differently"""
    enable_expert_parallel: Annotated[Switch, Flag("workers", "--enable-expert-parallel")] = False
    """with fast: each rank has some experts whole, instead of columns of every expert"""
    overlap: Annotated[Switch, Flag("workers", "--overlap")] = True
    """launch the next step before the tokens of the current one are read"""
    kernels: Annotated[Literal["cpu", "triton", "reference"] | None, Flag("device", "--kernels")] = None
    """variants of the operators (cpu; on CUDA triton)"""
    backing: Annotated[Literal["fixed", "mmap", "kvcached"] | None, Flag("device", "--backing")] = None
    """allocation of pages and states: fixed at the start, the others on demand (mmap; on CUDA kvcached)"""
    attention_backend: Annotated[Literal["triton", "flashinfer"], Flag("device", "--attention-backend")] = (
        "triton"
    )
    """on CUDA: library of attention; flashinfer is installed separately and needs --enforce-eager; no device
    has run it yet"""
    batch_invariant: Annotated[Switch, Flag("device", "--batch-invariant")] = False
    """on CUDA: the bits of an answer depend on its request alone, not on the other rows of a step or on how
    prompts are cut; slower (docs/gpu.md). On CPU they never do"""
    enforce_eager: Annotated[Switch, Flag("device", "--enforce-eager")] = False
    """launch decode steps without CUDA graphs; on CPU call their operators one by one"""
    async_scheduling: Annotated[Switch, Flag("device", "--async-scheduling")] = False
    """on CUDA: make the inputs of the next step while the current one runs; no device has run it yet"""
    numa_bind: Annotated[Switch, Flag("device", "--numa-bind")] = False
    """keep each rank on the NUMA node of its GPU, threads and memory; the ranks of a worker on CPUs share out
    the nodes; no device has run it yet"""
    gpu_memory_utilization: Annotated[
        float, Field(strict=True, gt=0, le=1), Flag("memory", "--gpu-memory-utilization", "PART")
    ] = 0.9
    """on CUDA: part of the device's memory, or of the worker's share of it, that a worker may take for
    weights, steps, CUDA graphs, pages and states"""
    memory_broker: Annotated[Switch, Flag("memory", "--memory-broker")] = True
    """let workers on one device lend each other unused memory, also between models, instead of keeping it"""
    checkpoint_strategy: Annotated[CheckpointStrategy, Flag("memory", "--checkpoint-strategy")] = "lazy"
    """checkpoints during decoding: none, double (two more states per row), or lazy (one, at a checkpoint)"""
    checkpoint_interval: Annotated[Count | None, Flag("memory", "--checkpoint-interval", "TOKENS")] = None
    """tokens between checkpoints during decoding, a multiple of the page size (the page size; on CUDA the
    tokens whose pages are as large as a checkpoint)"""
    checkpoints_per_path: Annotated[Count, Flag("memory", "--checkpoints-per-path", "N")] = 16
    """maximum number of checkpoints kept along one prefix"""
    eviction_policy: Annotated[Policy, Flag("memory", "--eviction-policy")] = "value"
    """evict first: the least recently used entry, or the one that saves the least compute per byte"""
