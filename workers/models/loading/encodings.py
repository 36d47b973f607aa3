"""The encodings of a named tensor in a folder: plain, quantised, or expert by expert. Pure.

Plain        NAME
Scaled       NAME in 8 bits, NAME_scale_inv or NAME_scale, perhaps NAME_zero_point    (fp8, int8)
PackedInts   NAME_packed, NAME_scale, perhaps NAME_zero_point and NAME_g_idx       (int8, int4 in int32)
Mxfp4        NAME_blocks [E, N, K / 32, 16] and NAME_scales of a tensor [E, K, N]     (gpt-oss)
Stacked      experts.N.gate_proj.weight .. of experts.gate_up_proj, each as above
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, assert_never

from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.loading.tensor_files import Header

FLOATS = frozenset({"F32", "BF16", "F16"})
EIGHT_BITS = frozenset({"F8_E4M3", "F8_E5M2", "I8"})
INT32 = frozenset({"I32"})
SCALES = FLOATS | {"F8_E8M0"}
METHODS = (
    "fp8, compressed-tensors (float-quantized, int-quantized, naive-quantized, pack-quantized) and mxfp4"
)
FORMATS = frozenset({"float-quantized", "int-quantized", "naive-quantized", "pack-quantized"})
UNREAD = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "weight_shape")
"""The suffixes of tensors for the quantisation of activations, keys and values, or with a shape."""

MXFP4_GROUP = 32
"""The number of values that share a scale."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """The content of `quantization_config` that applies to all weights.

    scale       the suffix of the names of scales
    block       the rows and columns that share a scale where it is not one for the tensor or for each row
    """

    scale: str = "_scale"
    bits: int = 8
    block: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Plain:
    name: str


@dataclass(frozen=True, slots=True)
class Scaled:
    """(value - zero point) * scale."""

    weight: str
    scale: str
    zero_point: str | None


@dataclass(frozen=True, slots=True)
class PackedInts:
    """Like Scaled; `group_of` is the column of the scales for each column of the weight."""

    packed: str
    scale: str
    zero_point: str | None
    group_of: str | None


@dataclass(frozen=True, slots=True)
class Mxfp4:
    blocks: str
    scales: str


Matrix: TypeAlias = Plain | Scaled | PackedInts


@dataclass(frozen=True, slots=True)
class Stacked:
    """A tensor with, for each index of its first dimension, matrices of equal shapes, one below the other."""

    experts: tuple[tuple[Matrix, ...], ...]


Encoding: TypeAlias = Matrix | Mxfp4 | Stacked


def scheme_of(config: Mapping[str, Any] | None) -> Scheme | None:
    """Return the scheme of the `quantization_config` in config.json, if there is one. Raises ModelError when
    it is not supported or not understood."""
    try:
        return None if config is None else _scheme_of(config)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"quantization_config of config.json is damaged ({error!r}): download the model again"
        ) from error


def _scheme_of(config: Mapping[str, Any]) -> Scheme:
    match config.get("quant_method"):
        case "fp8":
            block = config.get("weight_block_size")
            return Scheme("_scale_inv", block=None if block is None else (int(block[0]), int(block[1])))
        case "mxfp4":
            return Scheme()
        case "compressed-tensors":
            return _compressed_tensors(config)
        case method:
            raise _unsupported(f"quant_method {method!r}")


def encoding_of(
    name: str, shape: tuple[int, ...], scheme: Scheme | None, headers: Mapping[str, Header]
) -> Encoding:
    """Return how the folder with these tensors stores `name`; Plain when it does not."""
    if name not in headers and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        prefix, _, kind = name.rpartition(".")
        kinds = ("down_proj",) if kind == "down_proj" else ("gate_proj", "up_proj")
        stacks = [
            [f"{prefix}.{expert}.{projection}.weight" for projection in kinds] for expert in range(shape[0])
        ]
        if any(part_name in headers or f"{part_name}_packed" in headers for part_name in stacks[0]):
            return Stacked(
                tuple(tuple(_matrix(part_name, scheme, headers) for part_name in stack) for stack in stacks)
            )
    if scheme is not None and f"{name}_blocks" in headers:
        return Mxfp4(f"{name}_blocks", f"{name}_scales")
    return _matrix(name, scheme, headers)


def stored_by(encoding: Encoding) -> list[str]:
    """Return the names of its stored tensors."""
    match encoding:
        case Plain(name):
            return [name]
        case Scaled(weight, scale, zero_point):
            return [weight, scale, *_there(zero_point)]
        case PackedInts(packed, scale, zero_point, group_of):
            return [packed, scale, *_there(zero_point), *_there(group_of)]
        case Mxfp4(blocks, scales):
            return [blocks, scales]
        case Stacked(experts):
            return [name for stack in experts for matrix in stack for name in stored_by(matrix)]
        case _:
            assert_never(encoding)


def check(
    encoding: Encoding, shape: tuple[int, ...], scheme: Scheme | None, headers: Mapping[str, Header]
) -> None:
    """Raise ModelError when one of the stored tensors, which all exist, does not fit `shape`."""
    if isinstance(encoding, Stacked):
        for matrix in (matrix for stack in encoding.experts for matrix in stack):
            check(matrix, (shape[1] // len(encoding.experts[0]), shape[2]), scheme, headers)
        return
    for name, wanted, dtypes in _wanted(encoding, shape, scheme, headers):
        found = headers[name]
        if found.shape != wanted:
            raise ModelError(
                f"tensor {name} has shape {found.shape} but config.json asks for {wanted}: "
                "the weights and config.json belong to different models"
            )
        if found.dtype not in dtypes:
            raise ModelError(
                f"tensor {name} is {found.dtype} but {' or '.join(sorted(dtypes))} is needed: use a "
                "checkpoint in float32, bfloat16 or float16, or one whose config.json has a "
                f"quantization_config: {METHODS}"
            )


def steps_of(shape: tuple[int, ...], grid: tuple[int, ...], block: tuple[int, int] | None) -> tuple[int, ...]:
    """Return how many indices of each dimension share a scale, where the scales are a `grid` with as many
    dimensions. The grid that `shape` should have is `-(-size // step)` in each."""
    blocks = (1,) * (len(shape) - 2) + (block or (1, 1))
    return tuple(
        size if cells == 1 else 1 if cells == size else step
        for size, cells, step in zip(shape, grid, blocks[-len(shape) :], strict=True)
    )


def grid_of(scales: tuple[int, ...], dims: int) -> tuple[int, ...]:
    """Return the shape of scales with one dimension for each of the weight: a list has one per row."""
    return scales + (1,) * (dims - len(scales))


def _matrix(name: str, scheme: Scheme | None, headers: Mapping[str, Header]) -> Matrix:
    if scheme is None:
        return Plain(name)

    def there(suffix: str) -> str | None:
        return name + suffix if name + suffix in headers else None

    scale = there("_scale_inv") or there("_scale") or name + scheme.scale
    if f"{name}_packed" in headers:
        return PackedInts(f"{name}_packed", scale, there("_zero_point"), there("_g_idx"))
    if name in headers and headers[name].dtype in EIGHT_BITS:
        return Scaled(name, scale, there("_zero_point"))
    return Plain(name)


Wanted: TypeAlias = tuple[str, tuple[int, ...], frozenset[str]]
"""The expectation of a stored tensor: its name, shape, and the dtypes that it may have."""


def _wanted(
    encoding: Matrix | Mxfp4, shape: tuple[int, ...], scheme: Scheme | None, headers: Mapping[str, Header]
) -> Iterator[Wanted]:
    match encoding:
        case Plain(name):
            yield name, shape, FLOATS
        case Scaled(weight, scale, zero_point):
            yield weight, shape, EIGHT_BITS
            yield scale, _grid(scale, shape, scheme, headers), SCALES
            for name in _there(zero_point):
                yield name, headers[scale].shape, frozenset({"I8"})
        case PackedInts(packed, scale, zero_point, group_of):
            assert scheme is not None
            rows, columns = (-(-size * scheme.bits // 32) for size in shape)
            yield packed, (shape[0], columns), INT32
            yield scale, _grid(scale, shape, scheme, headers), SCALES
            for name in _there(zero_point):
                yield name, (rows, *headers[scale].shape[1:]), INT32
            for name in _there(group_of):
                yield name, shape[1:], INT32
        case Mxfp4(blocks, scales):
            experts, rows, columns = shape
            wanted = (experts, columns, rows // MXFP4_GROUP)
            yield blocks, (*wanted, MXFP4_GROUP // 2), frozenset({"U8"})
            yield scales, wanted, frozenset({"U8"})
        case _:
            assert_never(encoding)


def _grid(
    scale: str, shape: tuple[int, ...], scheme: Scheme | None, headers: Mapping[str, Header]
) -> tuple[int, ...]:
    """Return the shape of the scales. Raises ModelError if it does not fit."""
    found, block = headers[scale].shape, None if scheme is None else scheme.block
    if len(found) <= len(shape):
        grid = grid_of(found, len(shape))
        steps = steps_of(shape, grid, block)
        if grid == tuple(-(-size // step) for size, step in zip(shape, steps, strict=True)):
            return found
    parts = "of whole tensors or rows" if block is None else f"of blocks of {block}"
    raise ModelError(
        f"tensor {scale} has shape {found}, but these are no scales {parts} for a weight of {shape}: "
        "the weights and the quantization_config of config.json belong to different models"
    )


def _compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    if config.get("transform_config"):
        raise _unsupported("a transform_config")
    sparsity: Mapping[str, Any] = config.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise _unsupported(f"sparsity format {sparsity['format']!r}")
    kinds: set[Scheme] = set()
    for group in config.get("config_groups", {}).values():
        found = group.get("format") or config.get("format")
        if found not in FORMATS:
            raise _unsupported(f"format {found!r}")
        kinds.add(_kind(group["weights"]))
    if len(kinds) != 1:
        raise _unsupported(f"{len(kinds)} kinds of weights in one model")
    return kinds.pop()


def _kind(weights: Mapping[str, Any]) -> Scheme:
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    if bits not in {4, 8} or (bits == 4 and weights.get("type") != "int"):
        raise _unsupported(f"{bits} bits of type {weights.get('type')!r}")
    match strategy:
        case "tensor" | "channel":
            block = None
        case "group":
            block = (1, int(weights["group_size"]))
        case "block":
            rows, columns = weights["block_structure"]
            block = (int(rows), int(columns))
        case _:
            raise _unsupported(f"strategy {strategy!r}")
    return Scheme(bits=bits, block=block)


def _there(name: str | None) -> list[str]:
    return [] if name is None else [name]


def _unsupported(what: str) -> ModelError:
    return ModelError(
        f"quantization_config of config.json has {what}: supported are {METHODS}; "
        "use such a checkpoint, or one in float32, bfloat16 or float16"
    )
