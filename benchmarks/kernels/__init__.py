"""Operators and models on CPU against the machine's rooflines, the definitions and their peers."""

from benchmarks.kernels.shapes import HYBRID_77M, PAGE_TOKENS, step_inputs

__all__ = ["HYBRID_77M", "PAGE_TOKENS", "step_inputs"]
