"""The type of the factors of a product. Needs no torch: settings name it."""

from typing import Literal

ComputeDtype = Literal["float32", "bfloat16"]
"""Sums are float32. "float32" widens weights in bfloat16; "bfloat16" rounds what they are multiplied with, to
nearest, ties to even, where a denormal is zero."""
