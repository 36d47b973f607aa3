"""How each tensor of Qwen3-Next is cut for tensor parallelism, and what a rank's part of the config is."""

from dataclasses import replace

from tidemill.kvstore.layout import Attention, LayerSpec, Linear
from tidemill.kvstore.shards import share_of
from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.qwen3_next_config import Config
from tidemill.workers.tp.sharding import Cut, Even, Heads, Whole

LAYERS = "model.layers."


def cut_of(config: Config, name: str, rows: int) -> Cut:
    """Of the tensor `name` with `rows` rows. Projections into heads and inner columns give a rank its heads
    and columns; projections back into the hidden width give it some of those columns, over the full input."""
    names = name.split(".")
    match names[-2] if names[-1] in {"weight", "bias"} else names[-1]:
        case "q_proj":
            return Heads(config.heads.query_heads, (rows,))
        case "k_proj" | "v_proj":
            return Heads(_attention(config, name).kv_heads, (rows,))
        case "in_proj_qkvz" | "in_proj_ba" | "A_log" | "dt_bias":
            return Heads(_linear(config, name).key_heads, (rows,))
        case "conv1d":
            spec = _linear(config, name)
            keys = spec.key_heads * spec.key_dim
            return Heads(spec.key_heads, (keys, keys, rows - 2 * keys))
        case "o_proj" | "out_proj" | "gate_proj" | "up_proj" | "down_proj" | "embed_tokens" | "lm_head":
            return Even()
        case (
            "gate" | "shared_expert_gate" | "q_norm" | "k_norm" | "norm"
            | "input_layernorm" | "post_attention_layernorm"
        ):  # fmt: skip
            return Whole()
        case _:
            raise AssertionError(f"nobody says how {name} is cut")


def sizes(config: Config) -> tuple[int, ...]:
    """Of the groups that can run this model: the heads of every kind can be divided, or be copied alike."""
    return tuple(size for size in range(1, config.heads.query_heads + 1) if _divides(config, size))


def local(config: Config, size: int) -> Config:
    """The config with the heads that one of `size` ranks has; all other widths are of the whole.

    Raises ModelError that names the sizes that work.
    """
    if size not in sizes(config):
        kinds = {"query": config.heads.query_heads}
        for layer in config.layers:
            kinds |= {"key": layer.key_heads} if isinstance(layer, Linear) else {"KV": layer.kv_heads}
        heads = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        raise ModelError(
            f"{size} ranks cannot divide the heads of this model ({heads}): "
            f"set --tensor-parallel-size to {' or '.join(map(str, sizes(config)))}"
        )
    heads = replace(config.heads, query_heads=config.heads.query_heads // size)
    return replace(config, layers=share_of(config.layers, size), heads=heads)


def _divides(config: Config, size: int) -> bool:
    try:
        share_of(config.layers, size)
    except ValueError:
        return False
    return config.heads.query_heads % size == 0


def _layer(config: Config, name: str) -> LayerSpec:
    return config.layers[int(name.removeprefix(LAYERS).partition(".")[0])]


def _attention(config: Config, name: str) -> Attention:
    layer = _layer(config, name)
    assert isinstance(layer, Attention)
    return layer


def _linear(config: Config, name: str) -> Linear:
    layer = _layer(config, name)
    assert isinstance(layer, Linear)
    return layer
