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

from tidemill.kernels.activation import cpu as activation_cpu
from tidemill.kernels.activation import reference as activation_reference
from tidemill.kernels.attention import cpu as attention_cpu
from tidemill.kernels.attention import flashinfer
from tidemill.kernels.attention import reference as attention_reference
from tidemill.kernels.causal_conv import cpu as causal_conv_cpu
from tidemill.kernels.causal_conv import reference as causal_conv_reference
from tidemill.kernels.draw import cpu as draw_cpu
from tidemill.kernels.draw import reference as draw_reference
from tidemill.kernels.embed import reference as embed_reference
from tidemill.kernels.gated_delta import cpu as gated_delta_cpu
from tidemill.kernels.gated_delta import reference as gated_delta_reference
from tidemill.kernels.linear import cpu as linear_cpu
from tidemill.kernels.linear import reference as linear_reference
from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.linear.stored import Stored
from tidemill.kernels.mamba2 import cpu as mamba2_cpu
from tidemill.kernels.mamba2 import reference as mamba2_reference
from tidemill.kernels.moe import cpu as moe_cpu
from tidemill.kernels.moe import reference as moe_reference
from tidemill.kernels.moe.experts import Experts
from tidemill.kernels.moe.routing import Choice, RouteTokens
from tidemill.kernels.page_copy import cpu as page_copy_cpu
from tidemill.kernels.page_copy import reference as page_copy_reference
from tidemill.kernels.page_copy.planes import PageCopy
from tidemill.kernels.rms_norm import cpu as rms_norm_cpu
from tidemill.kernels.rms_norm import reference as rms_norm_reference
from tidemill.kernels.rope_store import cpu as rope_store_cpu
from tidemill.kernels.rope_store import reference as rope_store_reference
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
    gated_delta: gated_delta_cpu.GatedDelta
    mamba2: mamba2_cpu.Mamba2
    rope_angles: Callable[[Tensor, Tensor], Tensor]
    rope_store: RopeStore
    attention: attention_cpu.AttentionCall
    gated_attention: attention_cpu.GatedAttentionCall
    route: RouteTokens
    own_experts: Callable[[Choice, int, int], Choice]
    moe_inner: Callable[[Tensor, Choice, Experts], Tensor]
    moe_outer: moe_cpu.MoeOuter
    moe_outer_norm: moe_cpu.MoeOuterNorm
    count: Callable[[Tensor, Tensor], None]
    adjust: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    draw: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    compute_dtype: ComputeDtype = "float32"
    joins_shared: bool = False
    capture: Capture | None = None


REFERENCE = Operators(
    embed=embed_reference.embed,
    pack=linear_reference.pack,
    linear=linear_reference.linear,
    linear_silu=linear_reference.linear_silu,
    logits=linear_reference.logits,
    linear_heads=linear_reference.linear_heads,
    add_norm=rms_norm_reference.add_norm,
    rms_norm=rms_norm_reference.rms_norm,
    rms_norm_gated=rms_norm_reference.rms_norm_gated,
    silu_mul=activation_reference.silu_mul,
    sigmoid_mul=activation_reference.sigmoid_mul,
    causal_conv=causal_conv_reference.causal_conv,
    gated_delta=gated_delta_reference.gated_delta,
    mamba2=mamba2_reference.mamba2,
    rope_angles=rope_store_reference.rope_angles,
    rope_store=rope_store_reference.rope_store,
    attention=attention_reference.attention,
    gated_attention=attention_reference.gated_attention,
    route=moe_reference.route,
    own_experts=moe_reference.own_experts,
    moe_inner=moe_reference.moe_inner,
    moe_outer=moe_reference.moe_outer,
    moe_outer_norm=moe_reference.moe_outer_norm,
    count=draw_reference.count,
    adjust=draw_reference.adjust,
    draw=draw_reference.draw,
)


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
            return replace(
                REFERENCE,
                compute_dtype=compute_dtype,
                pack=partial(linear_reference.pack, compute_dtype=compute_dtype),
                attention=partial(attention_reference.attention, compute_dtype=compute_dtype),
                gated_attention=partial(attention_reference.gated_attention, compute_dtype=compute_dtype),
            )
        case "cpu":
            library = build(cache_dir)
            return Operators(
                compute_dtype=compute_dtype,
                capture=Recorder(library).capture,
                embed=embed_reference.embed,
                pack=linear_cpu.bind_pack(library, compute_dtype),
                linear=linear_cpu.bind_linear(library),
                linear_silu=linear_cpu.bind_linear_silu(library),
                logits=linear_cpu.bind_linear(library),
                linear_heads=linear_cpu.bind_linear_heads(library),
                add_norm=rms_norm_cpu.bind_add_norm(library),
                rms_norm=rms_norm_cpu.bind_rms_norm(library),
                rms_norm_gated=rms_norm_cpu.bind_rms_norm_gated(library),
                silu_mul=activation_cpu.bind_silu_mul(library),
                sigmoid_mul=activation_cpu.bind_sigmoid_mul(library),
                causal_conv=causal_conv_cpu.bind(library),
                gated_delta=gated_delta_cpu.bind(library),
                mamba2=mamba2_cpu.bind(library),
                rope_angles=rope_store_cpu.bind_rope_angles(library),
                rope_store=rope_store_cpu.bind_rope_store(library),
                attention=attention_cpu.bind(library, compute_dtype),
                gated_attention=attention_cpu.bind_gated(library, compute_dtype),
                route=moe_cpu.bind_route(library),
                own_experts=moe_reference.own_experts,
                moe_inner=moe_cpu.bind_moe_inner(library),
                moe_outer=moe_cpu.bind_moe_outer(library),
                moe_outer_norm=moe_cpu.bind_moe_outer_norm(library),
                count=draw_cpu.bind_count(library),
                adjust=draw_cpu.bind_adjust(library),
                draw=draw_cpu.bind_draw(library),
            )
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


def page_copy(variant: Variant, cache_dir: Path) -> PageCopy:
    """Return the copy to and from the caches of other engines, which no model uses. Raises
    KernelUnavailable.

    `reference` takes any device, `cpu` host memory, `triton` CUDA memory.
    """
    match variant:
        case "reference":
            return page_copy_reference.page_copy
        case "cpu":
            return page_copy_cpu.bind(build(cache_dir))
        case "triton":
            return _triton("page_copy")
        case _:
            assert_never(variant)


def _triton(operator: str) -> Any:  # noqa: ANN401 - a function of its own type for each operator
    """Its function for CUDA memory, imported when asked for: not every machine has triton."""
    if find_spec("triton") is None:
        raise KernelUnavailable("no triton for the CUDA kernels: pip install 'tidemill[gpu]'")
    module = f"tidemill.kernels.{FOLDERS.get(operator, operator)}.cuda"
    found = None if find_spec(module) is None else getattr(import_module(module), operator, None)
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
    names = [*NAMES, "page_copy"]
    lines = [f"{'operator':16}{'cpu/reference':16}{'cuda/reference':16}{'cpu/cpu':16}cuda/triton"]
    lines += [
        f"{name:16}{'yes':16}{'yes':16}{cpu:16}{tried(lambda name=name: _triton(name))}" for name in names
    ]
    return "\n".join([*lines, *sorted(problems)])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(f"{table(Path(folder))}\n")
