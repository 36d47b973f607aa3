"""Bugs to plant in the models and the loading of weights."""

from tests.mutations.planted import Planted

BUGS: tuple[Planted, ...] = (
    Planted(
        "RoPE scaling leaves the attention scale unchanged",
        "workers/models/architectures/decoder.py::Decoder.work",
        "$SCALED(self.$OPS.$ROPE_ANGLES($INPUTS.$POSITIONS_T, $FREQUENCIES_R), $ROPE.$SCALE",
        "self.$OPS.$ROPE_ANGLES($INPUTS.$POSITIONS_T, $FREQUENCIES_R",
        "tests/parity/test_architectures.py::test_architecture_passes[qwen3/stretched-logits]",
    ),
    Planted(
        "layers overlap in a page",
        "workers/models/inputs.py::_Pages.next",
        "return self.$VIEW($SHAPE, $STRIDES, 2 * $SIZE)",
        "return self.$VIEW($SHAPE, $STRIDES, $SIZE)",
        "tests/unit/kvstore/test_layout.py",
    ),
    Planted(
        "attention sinks are not loaded",
        "workers/models/layers/attention.py::AttentionConfig.load",
        '$SINKS_H=$READ("self_attn.sinks").values.float() if self.$SINKS else None,',
        "$SINKS_H=None,",
        "tests/parity/test_architectures.py::test_architecture_passes[gpt_oss/alternating-logits]",
    ),
    Planted(
        "the fingerprint ignores which tensor has which bytes",
        "workers/models/loading/checkpoint.py::WeightsFolder.fingerprint",
        'map(" ".$JOIN, sorted(self.$DIGESTS.$ITEMS()',
        "sorted(self.$DIGESTS.values(",
        "tests/unit/workers/models/test_loading.py",
    ),
    Planted(
        "a slice of a quantised weight uses the scales of the first rows",
        "workers/models/loading/dequantise.py::_Grid.of",
        "$START // $STEP,",
        "0,",
        "tests/unit/workers/models/loading/test_dequantise.py",
    ),
    Planted(
        "a shard splits a pair of columns",
        "workers/models/loading/sharding.py::part_of",
        "$SHARE = -(-$RUN_ROWS // ($STEP * $SIZE)) * $STEP",
        "$SHARE = -(-$RUN_ROWS // $SIZE)",
        "tests/unit/workers/models/loading/test_sharding.py",
    ),
)
