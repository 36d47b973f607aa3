"""Bugs in finding and making the compiled kernels."""

from tests.mutations.planted import UNIT, Planted

BUILD = f"{UNIT}/kernels/test_build.py"

KERNEL_BUGS = (
    Planted(
        "a CPU gets kernels that it cannot run",
        "kernels/compiler.py",
        "        if has.issuperset(needs) and path.exists():\n",
        "        if path.exists():\n",
        BUILD,
    ),
    Planted(
        "kernels of other sources are taken",
        "kernels/compiler.py",
        "        digest.update(source.read_bytes())\n",
        "        digest.update(source.name.encode())\n",
        BUILD,
    ),
    Planted(
        "what a wheel brought is not looked for",
        "kernels/build.py",
        "    if made is not None:\n",
        "    if False and made is not None:\n",
        BUILD,
    ),
)
