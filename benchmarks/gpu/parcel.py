"""Collect what `benchmarks.gpu.minutes` needs on a machine that has torch, Triton and transformers alone.

    python -m benchmarks.gpu.parcel FOLDER [--python 3.12]       or: make gpu-parcel

FOLDER receives wheels for CPython 3.12 on Linux x86-64: Tidemill with compiled CPU kernels, what it and the
tests import, py-spy and fla-core. Packages that torch, Triton and transformers bring are left out, and so are
parts of Ray that Tidemill does not use. The wheels are compressed with LZMA, which pip reads.
`pip install --no-index --no-deps FOLDER/*.whl` installs them.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZIP_LZMA, ZipFile

ROOT = Path(__file__).parents[2]
GLIBC = 34
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(5, GLIBC + 1)), "manylinux2014_x86_64")
PRESENT = ("torch", "triton", "transformers")
CARRIED = ("tidemill", "pytest", "pytest-xdist", "hypothesis", "py-spy", "fla-core", "einops")
RAY_UNUSED = tuple(
    f"ray/{part}/" for part in ("jars", "rllib", "tune", "train", "data", "serve", "llm", "dashboard/client")
)
UNUSED = ("virtualenv", "distlib", "python-discovery")
"""Packages that Ray needs for environments of its own alone."""

MIB_MAX = 64


def run(*command: object) -> None:
    subprocess.run(list(map(str, command)), check=True, cwd=ROOT)  # noqa: S603


def resolved(names: tuple[str, ...], folder: Path, python: str) -> dict[str, str]:
    """Return the packages that these need, each with its version, for the machine that receives them."""
    wanted, found = folder / "wanted.in", folder / "found.txt"
    wanted.write_text("\n".join(names))
    machine = ("--python-version", python, "--python-platform", f"x86_64-manylinux_2_{GLIBC}")
    quiet = ("--quiet", "--no-header", "--no-annotate", "--find-links", folder, "-c", "constraints.txt")
    run("uv", "pip", "compile", *quiet, *machine, wanted, "-o", found)
    lines = [line.split(" ;")[0] for line in found.read_text().splitlines()]
    return dict(line.split("==") for line in lines if "==" in line)


def compress(wheel: Path) -> None:
    """Write the wheel without the unused parts of Ray, and without their lines in its record."""
    small = wheel.with_suffix(".small")
    with ZipFile(wheel) as old, ZipFile(small, "w") as new:
        for entry in old.infolist():
            if entry.filename.startswith(RAY_UNUSED):
                continue
            data = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines(keepends=True)
                data = "".join(line for line in lines if not line.startswith(RAY_UNUSED)).encode()
            new.writestr(entry, data, ZIP_LZMA)  # keeps the entry's permissions
    small.replace(wheel)


def collect(folder: Path, python: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    pip = (sys.executable, "-m", "pip")
    with TemporaryDirectory() as scratch:
        work = Path(scratch)
        run(*pip, "wheel", "-q", "--no-deps", "-c", "constraints.txt", "-w", work, ".")
        (own,) = work.glob("tidemill-*.whl")
        lacking = resolved(CARRIED, work, python)
        for name in (*resolved(PRESENT, work, python), *UNUSED, "tidemill"):
            lacking.pop(name, None)
        machine = ("--python-version", python, *(f"--platform={platform}" for platform in PLATFORMS))
        exact = (f"{name}=={version}" for name, version in lacking.items())
        run(*pip, "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", folder, *machine, *exact)
        (folder / own.name).write_bytes(own.read_bytes())
    for wheel in folder.glob("*.whl"):
        compress(wheel)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="receives the wheels; older ones in it are removed")
    parser.add_argument("--python", default="3.12", help="the version there (3.12)")
    args = parser.parse_args()
    folder: Path = args.folder.resolve()
    collect(folder, args.python)
    sizes = {wheel.name: wheel.stat().st_size / 2**20 for wheel in folder.glob("*.whl")}
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True)[:8]:
        print(f"{sizes[name]:8.1f} MiB  {name}")
    print(f"{sum(sizes.values()):8.1f} MiB  {len(sizes)} wheels (the aim is at most {MIB_MAX})")


if __name__ == "__main__":
    main()
