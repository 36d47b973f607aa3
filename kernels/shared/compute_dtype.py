"""The type of the factors of a product. Needs no torch: settings name it."""

from typing import Literal

ComputeDtype = Literal["float32", "bfloat16"]
"""Sums are float32. "float32" widens weights in bfloat16; "bfloat16" rounds what they are multiplied with, to
nearest, ties to even, where a denormal is zero."""

BITS: dict[ComputeDtype, str] = {"float32": "float32", "bfloat16": "bfloat16.2"}
"""The names of what the products of a type give, for the namespace of pages: another one for other bits
(decision 54)."""
