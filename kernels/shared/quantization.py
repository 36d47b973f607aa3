"""The names of what `--quantization` makes of weights. Needs no torch: settings name it."""

from typing import Literal

Quantization = Literal[
    "fp8",
    "int8",
    "int4",
    "fp8_per_tensor",
    "fp8_per_channel",
    "fp8_per_block",
    "int8_per_channel_weight_only",
]
"""The codes of matrices. The long names are vLLM's, with its recipes; short ones include the head."""
