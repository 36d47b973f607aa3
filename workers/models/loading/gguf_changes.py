"""Undo the changes of tensors that converters to GGUF make: rows in another order, other numbers. Pure."""

from collections.abc import Callable

import torch

from tidemill.kernels.linear.stored import Stored, plain
from tidemill.workers.models.loading.config_json import Raw, count, size


def original(weight: Stored, change: str, config: Raw) -> Stored:
    """Return a whole tensor as it is in a Hugging Face folder."""
    if change.endswith("minus exp"):
        weight = plain((-weight.values).log())
    elif change == "plus 1":
        weight = plain(weight.values - 1)
    elif change == "tiled columns" and weight.group and size(config, "linear_value_head_dim") % weight.group:
        weight = plain(weight.values)
    if change == "apart":  # gate and up of experts
        return weight.moved(
            lambda rows: rows.reshape(len(rows), 2, -1, *rows.shape[2:]).transpose(1, 2).reshape(rows.shape)
        )
    if change == "rotary":
        heads = size(config, "num_attention_heads")
        half = (count(config, "head_dim") or size(config, "hidden_size") // heads) // 2
        return weight.moved(
            lambda rows: rows.reshape(-1, half, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
        )
    moves = change.startswith(("tiled", "by part"))
    return weight.moved(_of_delta(change, config)) if moves else weight


def _of_delta(change: str, config: Raw) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return how rows of the gated delta rule move. In a folder the values of a key head are neighbours; a
    file has the first of each key head, then the second of each."""
    groups, heads = size(config, "linear_num_key_heads"), size(config, "linear_num_value_heads")
    keys, per_group = groups * size(config, "linear_key_head_dim"), heads // groups
    values = heads * size(config, "linear_value_head_dim")

    def grouped(rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(per_group, groups, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    match change:
        case "tiled" | "tiled minus exp":
            return grouped
        case "tiled behind keys":
            return lambda rows: torch.cat([rows[: 2 * keys], grouped(rows[2 * keys :])])
        case "tiled columns":
            return lambda columns: grouped(columns.T.contiguous()).T.contiguous()
        case "by part":
            sizes = [keys, keys, values, values]
            return lambda rows: torch.cat(
                [part.reshape(groups, -1, rows.shape[1]) for part in torch.split(rows, sizes)], 1
            ).flatten(0, 1)
        case _:
            raise AssertionError(change)
