"""Bugs to plant in how weights are read and cut."""

from tests.mutations.planted import UNIT, Planted

DEQUANTISE = f"{UNIT}/workers/models/test_dequantise.py"
ENCODINGS = f"{UNIT}/workers/models/test_encodings.py"
SHARDING = f"{UNIT}/workers/models/test_sharding.py"
LOADING = f"{UNIT}/workers/models/test_loading.py"

WEIGHT_BUGS = (
    Planted(
        "a part of a quantised weight has the scales of the first rows",
        "workers/models/loading/dequantise.py",
        "found = found.narrow(dim, start // step, -(-end // step) - start // step)",
        "found = found.narrow(dim, 0, -(-end // step) - start // step)",
        DEQUANTISE,
    ),
    Planted(
        "a part that begins inside a block has the scales of whole blocks",
        "workers/models/loading/dequantise.py",
        "torch.arange(start, end) // step - start // step",
        "torch.arange(end - start) // step",
        DEQUANTISE,
    ),
    Planted(
        "the higher half of a byte comes first",
        "workers/models/loading/dequantise.py",
        "torch.stack([values_16[codes & 15], values_16[codes >> 4]], dim=1)",
        "torch.stack([values_16[codes >> 4], values_16[codes & 15]], dim=1)",
        DEQUANTISE,
    ),
    Planted(
        "zero points are not taken off",
        "workers/models/loading/dequantise.py",
        "        found = _looked_up(table, codes[_slices(region)])\n        if offset is not None:",
        "        found = _looked_up(table, codes[_slices(region)])\n        if False:",
        DEQUANTISE,
    ),
    Planted(
        "the order of groups is not looked at",
        "workers/models/loading/dequantise.py",
        "self._group_of = None if group_of is None or (group_of < 0).any() else group_of",
        "self._group_of = None",
        DEQUANTISE,
    ),
    Planted(
        "an expert that is stored apart has the rows of its neighbour",
        "workers/models/loading/dequantise.py",
        "own = max(start - index * rows, 0), min(end - index * rows, rows)",
        "own = max(start - index * rows, 0), min(end, rows)",
        ENCODINGS,
    ),
    Planted(
        "zeros come once, behind all runs",
        "workers/models/loading/dequantise.py",
        "at += end - start + part.zeros",
        "at += end - start",
        SHARDING,
    ),
    Planted(
        "a pair of columns is cut in two",
        "workers/models/loading/sharding.py",
        "share = -(-run_rows // (step * size)) * step",
        "share = -(-run_rows // size)",
        SHARDING,
    ),
    Planted(
        "the fingerprint forgets which tensor has which bytes",
        "workers/models/loading/checkpoint.py",
        'map(" ".join, sorted(self._digests.items()))',
        "sorted(self._digests.values())",
        LOADING,
    ),
    Planted(
        "a scale may be of other blocks than the config says",
        "workers/models/loading/encodings.py",
        "if grid == tuple(-(-size // step) for size, step in zip(shape, steps, strict=True)):",
        "if grid:",
        ENCODINGS,
    ),
    Planted(
        "rotated weights are read as if they were not",
        "workers/models/loading/encodings.py",
        'if config.get("transform_config"):',
        "if False:",
        ENCODINGS,
    ),
)
