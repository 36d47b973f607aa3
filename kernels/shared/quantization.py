"""The names of what `--quantization` makes of weights. Needs no torch: settings name it."""

from typing import Literal

Quantization = Literal[
    "fp8",
    "int8",
    "w8a8",
    "int4",
    "fp8_per_tensor",
    "fp8_per_channel",
    "fp8_per_block",
    "int8_per_channel_weight_only",
    "w8a8_int8",
]
"""The codes of matrices. Long names are vLLM's and, of INT8 activations, SGLang's, with their recipes; short
ones include the head."""
