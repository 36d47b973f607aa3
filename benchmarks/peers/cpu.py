"""The name of the CPU that figures belong to."""

from pathlib import Path


def cpu_name() -> str:
    """Return the model of the CPU, and what it has for products of bfloat16."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(line for line in lines if line.startswith("model name")).partition(": ")[2]
    flags = next(line for line in lines if line.startswith("flags")).split()
    kinds = [flag for flag in ("avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{model}, {' '.join(kinds)}"
