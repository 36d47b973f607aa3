"""The name of the CPU that figures belong to."""

from pathlib import Path

KINDS = ("avx512f", "avx512_bf16", "amx_bf16")
GENERATIONS = {("AMD EPYC", "25"): " (Zen 4)", ("AMD EPYC", "26"): " (Zen 5)"}


def cpu_name(kinds: tuple[str, ...] = KINDS) -> str:
    """Return the model of the CPU, and what it has for products of bfloat16, of `kinds`."""
    pairs = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines())
    has = {name.strip(): value.strip() for name, _, value in pairs}
    model, flags = has["model name"], has["flags"].split()
    found = " ".join(flag for flag in kinds if flag in flags)
    return f"{model}{GENERATIONS.get((model, has['cpu family']), '')}, {found}"
