"""Every operator by variant; `python -m tidemill.kernels.dispatch` prints what there is and what is not."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, assert_never

from torch import Tensor

from tidemill.kernels.attention import flashinfer
from tidemill.kernels.attention.cpu import AttentionCall
from tidemill.kernels.gated_delta.cpu import GatedDelta
from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.linear.stored import Stored
from tidemill.kernels.mamba2.cpu import Mamba2
from tidemill.kernels.moe.cpu import MoeOuter, MoeOuterNorm
from tidemill.kernels.moe.experts import Experts
from tidemill.kernels.moe.routing import Choice, RouteTokens
from tidemill.kernels.rope_store.cpu import RopeStore
from tidemill.kernels.shared.build import KernelUnavailable, build
from tidemill.kernels.shared.compute_dtype import ComputeDtype
from tidemill.kernels.shared.recording import Capture, Recorder
from tidemill.kernels.shared.rows import Rows

Variant = Literal["cpu", "triton", "reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators:
    """One variant of each operator; the docstrings in `reference.py` of its folder say what it computes.

    compute_dtype  the type of the factors that codes become
    joins_shared   an expert that all tokens share runs among the routed ones (`Routing.shared`)
    capture        records the calls of these operators; None: they cannot be recorded
    """

    embed: Callable[[Tensor, Stored], Tensor]
    pack: Callable[[Sequence[Stored], Tensor | None], Packed]
    linear: Callable[[Tensor, Packed], Tensor]
    linear_silu: Callable[[Tensor, Packed, Packed], Tensor]
    logits: Callable[[Tensor, Packed], Tensor]
    linear_heads: Callable[[Tensor, Packed], Tensor]
    add_norm: Callable[[Tensor | None, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rms_norm_gated: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    sigmoid_mul: Callable[[Tensor, Tensor], Tensor]
    causal_conv: Callable[[Tensor, Tensor, Tensor | None, Tensor, Rows], Tensor]
    gated_delta: GatedDelta
    mamba2: Mamba2
    rope_angles: Callable[[Tensor, Tensor], Tensor]
    rope_store: RopeStore
    attention: AttentionCall
    gated_attention: AttentionCall
    route: RouteTokens
    own_experts: Callable[[Choice, int, int], Choice]
    moe_inner: Callable[[Tensor, Choice, Experts], Tensor]
    moe_outer: MoeOuter
    moe_outer_norm: MoeOuterNorm
    count: Callable[[Tensor, Tensor], None]
    adjust: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    draw: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    compute_dtype: ComputeDtype = "float32"
    joins_shared: bool = False
    capture: Capture | None = None


NAMES = tuple(field.name for field in fields(Operators) if field.default is MISSING)
FOLDERS = {  # of the operators that are not called like theirs
    "pack": "linear",
    "linear_silu": "linear",
    "logits": "linear",
    "linear_heads": "linear",
    "add_norm": "rms_norm",
    "rms_norm_gated": "rms_norm",
    "silu_mul": "activation",
    "sigmoid_mul": "activation",
    "gated_attention": "attention",
    "rope_angles": "rope_store",
    "route": "moe",
    "own_experts": "moe",
    "moe_inner": "moe",
    "moe_outer": "moe",
    "moe_outer_norm": "moe",
    "count": "draw",
    "adjust": "draw",
}


def _variant(operator: str, module: str, prefix: str = "") -> Any:  # noqa: ANN401 - of a type of its own
    """Return the function of an operator in a module of its folder; None without one. `cpu.py` has functions
    that bind it to the compiled library."""
    name = f"tidemill.kernels.{FOLDERS.get(operator, operator)}.{module}"
    return None if find_spec(name) is None else getattr(import_module(name), prefix + operator, None)


REFERENCE = Operators(**{name: _variant(name, "reference") for name in NAMES})

PLAIN = ("embed", "own_experts")
"""The operators that torch computes on CPU, too."""

ROUNDED = ("pack", "attention", "gated_attention")
"""The operators that need to know the type of products."""

AttentionBackend = Literal["triton", "flashinfer"]
INVARIANT = (
    "linear",
    "linear_silu",
    "logits",
    "linear_heads",
    "attention",
    "gated_attention",
    "gated_delta",
    "mamba2",
)
"""The operators on CUDA whose order of sums depends on the step unless they are asked otherwise."""


def operators(
    variant: Variant,
    cache_dir: Path,
    compute_dtype: ComputeDtype = "float32",
    *,
    batch_invariant: bool = False,
    attention_backend: AttentionBackend = "triton",
) -> Operators:
    """All operators of one variant; compiled ones are kept in `cache_dir`. Raises KernelUnavailable.

    `compute_dtype` is the type of products with weights in bfloat16, and of those of `attention`. Weights in
    float32 have products in float32, whatever it is.

    `reference` is plain torch on any device and dtype; `cpu` takes float32 and is bit-exact: what it computes
    for a sequence does not depend on the batch, on how it is cut into steps, or on the number of threads.
    `triton` takes CUDA memory, and its own cache of compiled kernels is where Triton keeps it. Its products,
    and what it passes from operator to operator, are in the type of the weights, whatever `compute_dtype` is;
    what it adds up over layers is float32. With `batch_invariant` what it computes for a sequence depends on
    nothing else, as that of `cpu`. `attention_backend` is the library of `attention` and `gated_attention`.
    """
    match variant:
        case "reference":
            if compute_dtype == "float32":
                return REFERENCE
            rounded: dict[str, Any] = {
                name: partial(getattr(REFERENCE, name), compute_dtype=compute_dtype) for name in ROUNDED
            }
            return replace(REFERENCE, compute_dtype=compute_dtype, **rounded)
        case "cpu":
            library = build(cache_dir)
            found: dict[str, Any] = {name: getattr(REFERENCE, name) for name in PLAIN}
            for name in set(NAMES) - found.keys():
                given = (library, compute_dtype) if name in ROUNDED else (library,)
                found[name] = _variant(name, "cpu", "bind_")(*given)
            return Operators(**found, compute_dtype=compute_dtype, capture=Recorder(library).capture)
        case "triton":
            found = {name: _triton(name) for name in NAMES}
            for name in INVARIANT if batch_invariant else ():
                found[name] = partial(found[name], batch_invariant=True)
            if attention_backend == "flashinfer":
                library = flashinfer.installed(found["sigmoid_mul"])
                found |= {"attention": library.attention, "gated_attention": library.gated_attention}
            return Operators(**found, compute_dtype="bfloat16", joins_shared=True)
        case _:
            assert_never(variant)


def rounding_states(ops: Operators, round_tokens: int) -> Operators:
    """Return the operators with recurrent states rounded to bfloat16 whenever a multiple of `round_tokens` is
    in them."""
    gated_delta = partial(ops.gated_delta, round_tokens=round_tokens)
    return replace(ops, gated_delta=gated_delta, mamba2=partial(ops.mamba2, round_tokens=round_tokens))


def _triton(operator: str) -> Any:  # noqa: ANN401 - a function of its own type for each operator
    """Its function for CUDA memory, imported when asked for: not every machine has triton."""
    if find_spec("triton") is None:
        raise KernelUnavailable("no triton for the CUDA kernels: pip install 'tidemill[gpu]'")
    found = _variant(operator, "cuda")
    if found is None:
        raise KernelUnavailable(f"{operator} has no variant for CUDA memory: use --kernels cpu or reference")
    return found


def table(cache_dir: Path) -> str:
    """Operator x device x variant, and what to do about what is missing."""
    problems: set[str] = set()

    def tried(find: Callable[[], object]) -> str:
        try:
            find()
        except KernelUnavailable as error:
            problems.add(str(error))
            return "missing"
        return "yes"

    cpu = tried(lambda: operators("cpu", cache_dir))
    lines = [f"{'operator':16}{'cpu/reference':16}{'cuda/reference':16}{'cpu/cpu':16}cuda/triton"]
    lines += [
        f"{name:16}{'yes':16}{'yes':16}{cpu:16}{tried(lambda name=name: _triton(name))}" for name in NAMES
    ]
    return "\n".join([*lines, *sorted(problems)])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(f"{table(Path(folder))}\n")
