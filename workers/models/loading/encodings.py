"""The encodings of a named matrix in a folder: plain, as codes, or expert by expert. Pure.

The tensors of a folder show which it is, one matrix at a time: so recipes that leave some in floats or mix
kinds need no names of modules. The configuration only adds what shapes and dtypes leave open.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, TypeAlias, assert_never

from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.loading.tensor_files import Header
from tidemill.workers.models.loading.weights import Weight

FLOATS = frozenset({"F32", "BF16", "F16"})
EIGHT_BITS = frozenset({"F8_E4M3", "F8_E5M2", "I8"})
BYTES = frozenset({"U8"})
INT32 = frozenset({"I32"})
SCALES = FLOATS | {"F8_E8M0", "U8"}
SMALL_SCALES = frozenset({"F8_E4M3", "F8_E8M0", "U8"})
METHODS = "fp8, compressed-tensors, awq, gptq, mxfp4 and modelopt"
COMPRESSED = {
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
}
"""The formats of compressed-tensors."""

UNREAD = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "k_scale",
    "v_scale",
    "weight_shape",
)
"""The suffixes of tensors for the quantisation of activations, keys and values, or with a shape."""

Layout: TypeAlias = Literal["rows", "blocks", "gptq", "awq"]
"""The way in which codes make rows of outputs `[.., N, K]`. The first code of a word is the lowest.

rows     [.., N, words]
blocks   [E, N, K / 32, 16] of bytes
gptq     [words, N]; zero points [G, words]
awq      [K, words], 8 columns of N in each, as AWQ_ORDER; zero points alike
"""


@dataclass(frozen=True, slots=True)
class Format:
    """The tensors of a matrix as codes. `{name}` is that of the matrix, `{stem}` without `weight`.

    codes       of one of `dtypes`
    scales      the first name that there is, of one of `scale_dtypes`: U8 and F8_E8M0 are powers of two
    zeros       the codes that stand for 0, subtracted before scaling, if there are any
    group_of    int32 [K], the group of each column, if they are in another order
    factor      a float32 for all scales that are F8_E4M3: it multiplies them, or `divides`
    """

    codes: str
    dtypes: frozenset[str]
    scales: tuple[str, ...]
    scale_dtypes: frozenset[str] = SCALES
    zeros: str = "{name}_zero_point"
    group_of: str = "{name}_g_idx"
    factor: str | None = None
    divides: bool = False
    layout: Layout = "rows"


FORMATS = (
    Format("{name}", EIGHT_BITS, ("{name}_scale_inv", "{name}_scale")),
    Format("{name}", BYTES, ("{name}_scale",), SMALL_SCALES, factor="{name}_scale_2"),
    Format("{name}_packed", INT32, ("{name}_scale",)),
    Format(
        "{name}_packed", BYTES, ("{name}_scale",), SMALL_SCALES, factor="{name}_global_scale", divides=True
    ),
    Format("{name}_blocks", BYTES, ("{name}_scales",), BYTES, layout="blocks"),
    Format("{stem}qweight", INT32, ("{stem}scales",), FLOATS, "{stem}qzeros", "{stem}g_idx", layout="gptq"),
)
"""The formats of FP8, INT8 and MXFP8; NVFP4 of modelopt; INT4 and INT8 in words; NVFP4 and MXFP4 of
compressed-tensors; MXFP4 of gpt-oss; GPTQ and AWQ."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """The content of `quantization_config` that tensors do not show.

    blocks    the rows and columns that share a scale where it is not one for the tensor or for each row
    bits      of the codes in int32
    shift     zero points are stored too low by this
    inputs    the type of what INT8 is multiplied with: in "int8" each token has a dynamic scale; of "other",
              which the folder asks for, products have floats
    """

    method: str
    blocks: tuple[tuple[int, int], ...] = ()
    bits: tuple[int, ...] = ()
    shift: int = 0
    inputs: Literal["floats", "int8", "other"] = "floats"


@dataclass(frozen=True, slots=True)
class Plain:
    name: str
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Coded:
    """The names of the tensors of a format that the folder has or needs."""

    format: Format
    codes: str
    scales: str
    zeros: str | None = None
    group_of: str | None = None
    factor: str | None = None


Matrix: TypeAlias = Plain | Coded


@dataclass(frozen=True, slots=True)
class Stacked:
    """A tensor with, for each index of its first dimension, matrices of equal shapes, one below the other."""

    experts: tuple[tuple[Matrix, ...], ...]


Encoding: TypeAlias = Matrix | Stacked


def encoding_of(name: str, weight: Weight, scheme: Scheme | None, headers: Mapping[str, Header]) -> Encoding:
    """Return how the folder with these tensors stores `name`; Plain when it does not."""
    if name not in headers and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        prefix, _, kind = name.rpartition(".")
        kinds = ("down_proj",) if kind == "down_proj" else ("gate_proj", "up_proj")
        stacks = [
            [_matrix(f"{prefix}.{expert}.{projection}.weight", scheme, headers) for projection in kinds]
            for expert in range(weight.shape[0])
        ]
        if any(stored in headers for matrix in stacks[0] for stored in stored_by(matrix)):
            return Stacked(tuple(map(tuple, stacks)))
    found = _matrix(name, scheme, headers)
    return replace(found, transposed=weight.transposed) if isinstance(found, Plain) else found


def stored_by(encoding: Encoding) -> list[str]:
    """Return the names of its stored tensors."""
    match encoding:
        case Plain(name):
            return [name]
        case Coded(_, codes, scales, zeros, group_of, factor):
            return [name for name in (codes, scales, zeros, group_of, factor) if name is not None]
        case Stacked(experts):
            return [name for stack in experts for matrix in stack for name in stored_by(matrix)]
        case _:
            assert_never(encoding)


def has_codes(encoding: Encoding) -> bool:
    """Return whether all of it is stored as codes."""
    if isinstance(encoding, Stacked):
        return all(has_codes(matrix) for stack in encoding.experts for matrix in stack)
    return isinstance(encoding, Coded)


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
        if found.shape not in wanted:
            raise ModelError(
                f"tensor {name} has shape {found.shape} but config.json asks for "
                f"{' or '.join(map(str, dict.fromkeys(wanted)))}: "
                "the weights and config.json belong to different models"
            )
        if found.dtype not in dtypes:
            raise ModelError(
                f"tensor {name} is {found.dtype} but {' or '.join(sorted(dtypes))} is needed: use a "
                "checkpoint in float32, bfloat16 or float16, or one whose config.json has a "
                f"quantization_config: {METHODS}"
            )


def bits_of(encoding: Coded, shape: tuple[int, ...], scheme: Scheme, found: tuple[int, ...]) -> int:
    """Return the bits of a code, where the tensor with the codes has the shape `found`."""
    form = encoding.format
    return next(bits for bits in _bits(form, shape, scheme) if found == _codes_shape(form, shape, bits))


def num_bytes(
    encoding: Encoding, shape: tuple[int, ...], scheme: Scheme | None, headers: Mapping[str, Header]
) -> int:
    """Return the size in memory of codes with scales and offsets in float32; 0 for floats."""
    if isinstance(encoding, Stacked):
        below = (shape[1] // len(encoding.experts[0]), shape[2])
        return sum(
            num_bytes(matrix, below, scheme, headers) for stack in encoding.experts for matrix in stack
        )
    if isinstance(encoding, Plain):
        return 0
    assert scheme is not None
    is_transposed = encoding.format.layout in {"gptq", "awq"}
    grid = grid_of(headers[encoding.scales].shape, len(shape))
    groups = grid[0] if is_transposed else grid[-1]
    bits = bits_of(encoding, shape, scheme, headers[encoding.codes].shape)
    *rows, columns = shape
    return prod(rows) * (columns * bits // 8 + 4 * groups * (1 if encoding.zeros is None else 2))


def grid_of(scales: tuple[int, ...], dims: int) -> tuple[int, ...]:
    """Return the shape of scales with one dimension for each of the weight: a list has one per row."""
    return scales + (1,) * (dims - len(scales))


def steps_of(
    shape: tuple[int, ...], grid: tuple[int, ...], blocks: Sequence[tuple[int, int]]
) -> tuple[int, ...] | None:
    """Return how many indices of each dimension share a scale, where the scales are a `grid` with as many
    dimensions; None: they are none of these blocks."""
    for block in ((1, 1), *blocks):
        each = (1,) * (len(shape) - 2) + block
        steps = tuple(
            size if cells == 1 else step for size, cells, step in zip(shape, grid, each, strict=True)
        )
        if grid == tuple(-(-size // step) for size, step in zip(shape, steps, strict=True)):
            return steps
    return None


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
    method = config.get("quant_method")
    match method:
        case "fp8":
            block = config.get("weight_block_size")
            return Scheme(method, () if block is None else ((int(block[0]), int(block[1])),))
        case "mxfp4":
            return Scheme(method, ((1, 32),))
        case "modelopt" | "modelopt_fp4" | "modelopt_mixed":
            return Scheme(method, ((1, 16), (1, 32)))
        case "awq":
            _supported("version", config.get("version", "gemm").lower(), {"gemm"})
            return Scheme(method, _groups([config]), _some_bits([config], {4}))
        case "gptq":
            form = config.get("checkpoint_format") or "gptq"
            _supported("checkpoint_format", form, {"gptq", "gptq_v2"})
            dynamic: Mapping[str, Mapping[str, Any]] = config.get("dynamic") or {}
            rules = [config, *filter(None, dynamic.values())]
            return Scheme(method, _groups(rules), _some_bits(rules, {4, 8}), int(form == "gptq"))
        case "compressed-tensors":
            return _compressed_tensors(config)
        case _:
            raise _unsupported(f"quant_method {method!r}")


def _compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    if config.get("transform_config"):
        raise _unsupported("a transform_config")
    sparsity: Mapping[str, Any] = config.get("sparsity_config") or {}
    _supported("sparsity format", sparsity.get("format", "dense"), {"dense"})
    kinds = [group["weights"] for group in config.get("config_groups", {}).values()]
    if not kinds:
        raise _unsupported("no kind of weights")
    blocks: tuple[tuple[int, int], ...] = ()
    for group, weights in zip(config["config_groups"].values(), kinds, strict=True):
        form = group.get("format") or config.get("format")
        _supported("format", form, COMPRESSED)
        bits, kind = weights.get("num_bits"), weights.get("type")
        if bits not in {4, 8} or (bits == 4 and kind != ("int" if form == "pack-quantized" else "float")):
            raise _unsupported(f"{bits} bits of type {kind!r}")
        match weights.get("strategy"):
            case "tensor" | "channel":
                pass
            case "group" | "tensor_group":
                blocks += _groups([weights])
            case "block":
                rows, columns = weights["block_structure"]
                blocks += ((int(rows), int(columns)),)
            case strategy:
                raise _unsupported(f"strategy {strategy!r}")
    bits = tuple({weights["num_bits"]: None for weights in kinds})
    return Scheme("compressed-tensors", blocks, bits, inputs=_inputs(config["config_groups"].values()))


def _inputs(groups: Collection[Mapping[str, Any]]) -> Literal["floats", "int8", "other"]:
    """Return the type of what weights in INT8 are multiplied with. Tensors do not show their group: all must
    have one type."""
    integers = [
        group.get("input_activations")
        for group in groups
        if (group["weights"]["num_bits"], group["weights"].get("type")) == (8, "int")
    ]
    if not any(integers):
        return "floats"
    return "int8" if all(given and _by_tokens(given) for given in integers) else "other"


def _by_tokens(given: Mapping[str, Any]) -> bool:
    """Return whether activations become INT8 with a scale for each token."""
    asked = (given.get("num_bits", 8), given.get("type", "int"), given.get("strategy") or "token")
    return asked == (8, "int", "token") and given.get("dynamic") is True and given.get("symmetric", True)


def _groups(rules: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, int], ...]:
    """Return the blocks of the groups that these rules have; -1 is a whole row."""
    sizes = [int(rule["group_size"]) for rule in rules if rule.get("group_size") is not None]
    return tuple((1, size) for size in dict.fromkeys(sizes) if size > 0)


def _some_bits(rules: Sequence[Mapping[str, Any]], known: set[int]) -> tuple[int, ...]:
    found = tuple(dict.fromkeys(rule["bits"] for rule in rules if "bits" in rule))
    for bits in found:
        _supported("bits", bits, known)
    return found


def _matrix(name: str, scheme: Scheme | None, headers: Mapping[str, Header]) -> Matrix:
    names = {"name": name, "stem": name.removesuffix("weight")}
    for form in FORMATS:
        codes = form.codes.format(**names)
        if scheme is not None and codes in headers and headers[codes].dtype in form.dtypes:
            return _coded(form, codes, names, scheme, headers)
    return Plain(name)


def _coded(
    form: Format, codes: str, names: Mapping[str, str], scheme: Scheme, headers: Mapping[str, Header]
) -> Coded:
    def there(pattern: str | None, *, needed: bool = False) -> str | None:
        name = (pattern or "").format(**names)
        return name if name in headers or (needed and pattern) else None

    first, *_, last = (pattern.format(**names) for pattern in form.scales * 2)
    scales = first if scheme.method == "fp8" or first in headers else last
    if scheme.method == "awq":
        form = replace(form, layout="awq")
    is_small = scales in headers and headers[scales].dtype == "F8_E4M3"
    return Coded(
        form,
        codes,
        scales,
        there(form.zeros, needed=form.layout in {"gptq", "awq"}),
        there(form.group_of),
        there(form.factor, needed=is_small),
    )


Wanted: TypeAlias = tuple[str, Sequence[tuple[int, ...]], frozenset[str]]
"""The expectation of a stored tensor: its name, the shapes and the dtypes that it may have."""


def _wanted(
    encoding: Matrix, shape: tuple[int, ...], scheme: Scheme | None, headers: Mapping[str, Header]
) -> Iterator[Wanted]:
    if isinstance(encoding, Plain):
        plain = (*shape[:-2], shape[-1], shape[-2]) if encoding.transposed else shape
        yield encoding.name, [plain], FLOATS
        return
    assert scheme is not None
    form, bits = encoding.format, _bits(encoding.format, shape, scheme)
    shapes = [_codes_shape(form, shape, number) for number in bits]
    yield encoding.codes, shapes, form.dtypes
    grid = _grid(encoding, shape, scheme, headers)
    yield encoding.scales, [grid], form.scale_dtypes
    if encoding.zeros is not None:
        found = bits[shapes.index(headers[encoding.codes].shape)]
        yield encoding.zeros, [_zeros_shape(form, shape, grid, found)], form.dtypes
    if encoding.group_of is not None:
        yield encoding.group_of, [shape[-1:]], INT32
    if encoding.factor is not None:
        yield encoding.factor, [(), (1,)], frozenset({"F32"})


def _bits(form: Format, shape: tuple[int, ...], scheme: Scheme) -> tuple[int, ...]:
    """Return the bits that codes may have. An odd number of columns has none of 4."""
    some = (8,) if form.dtypes == EIGHT_BITS else (4,) if form.dtypes == BYTES else scheme.bits
    return tuple(bits for bits in some if bits * shape[-1] % 8 == 0)


def _codes_shape(form: Format, shape: tuple[int, ...], bits: int) -> tuple[int, ...]:
    *rows, columns = shape
    word = 32 if form.dtypes == INT32 else 8
    match form.layout:
        case "rows":
            return (*rows, -(-columns * bits // word))
        case "blocks":
            return (*rows, columns // 32, 16)
        case "gptq":
            return (-(-columns * bits // word), *rows)
        case "awq":
            return (columns, *rows[:-1], -(-rows[-1] * bits // word))
        case _:
            assert_never(form.layout)


def _zeros_shape(form: Format, shape: tuple[int, ...], grid: tuple[int, ...], bits: int) -> tuple[int, ...]:
    """Return the shape of the zero points for scales of the shape `grid`: words hold those of rows."""
    if form.dtypes != INT32:
        return grid
    words = -(-shape[-2] * bits // 32)
    return (words, *grid[1:]) if form.layout == "rows" else (grid[0], words)


def _grid(
    encoding: Coded, shape: tuple[int, ...], scheme: Scheme, headers: Mapping[str, Header]
) -> tuple[int, ...]:
    """Return the shape of the scales. Raises ModelError if it does not fit."""
    found = headers[encoding.scales].shape
    if len(found) <= len(shape):
        grid = grid_of(found, len(shape))
        if encoding.format.layout in {"gptq", "awq"}:
            grid = grid[::-1]
        if steps_of(shape, grid, scheme.blocks) is not None:
            return found
    parts = " or ".join(map(str, scheme.blocks))
    parts = f"of blocks of {parts}" if parts else "of whole tensors or rows"
    raise ModelError(
        f"tensor {encoding.scales} has shape {found}, but these are no scales {parts} for a weight of "
        f"{shape}: the weights and the quantization_config of config.json belong to different models"
    )


def _supported(what: str, found: object, known: Collection[object]) -> None:
    if found not in known:
        raise _unsupported(f"{what} {found!r}")


def _unsupported(what: str) -> ModelError:
    return ModelError(
        f"quantization_config of config.json has {what}: supported are {METHODS}; "
        "use such a checkpoint, or one in float32, bfloat16 or float16"
    )
