"""Collect what `benchmarks.gpu.minutes` needs beside PRESENT, nvcc and a C++ compiler.

    python -m benchmarks.gpu.parcel FOLDER [--python 3.12]       or: make gpu-parcel

FOLDER receives `parcel.tar.xz`: wheels for CPython 3.12 on Linux x86-64 of Tidemill with compiled CPU
kernels, of what it and the tests import, of py-spy and fla-core, and the sources of kvcached, which are
compiled there. Parts of Ray that Tidemill does not use are left out. The wheels are not compressed one by
one, because programs of Ray have much in common. The archive and the tracked files of the checkout have
MIB_MAX together.
"""

import argparse
import lzma
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZIP_STORED, ZipFile

ROOT = Path(__file__).parents[2]
GLIBC = 34
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(5, GLIBC + 1)), "manylinux2014_x86_64")
PRESENT = (
    *("torch", "triton", "transformers", "aiohttp", "einops", "execnet", "grpcio", "hypothesis", "ninja"),
    *("prometheus-client", "psutil", "pytest", "pytest-xdist", "requests", "rich", "uvloop", "xxhash"),
)
COMPILED_THERE = "kvcached"
CARRIED = ("tidemill", "pytest", "pytest-xdist", "hypothesis", "py-spy", "fla-core", "einops")
RAY_UNUSED = tuple(
    f"ray/{part}/" for part in ("jars", "rllib", "tune", "train", "data", "serve", "llm", "dashboard/client")
)
LIKE_CUDA = """
import torch
from torch.utils import cpp_extension
torch.version.cuda, cpp_extension.CUDA_HOME = "13.0", "/usr"
"""
"""Makes the name and version of what is compiled there readable with a torch for CPUs."""
UNUSED = ("virtualenv", "distlib", "python-discovery")
"""Packages that Ray needs for environments of its own alone."""

MIB_MAX = 50
PARCEL_MIB_MAX = 36
"""The rest is for the checkout."""
DICTIONARY_BYTES = 256 << 20
NAME = "parcel.tar.xz"


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


def without_unused(wheel: Path, target: Path) -> None:
    """Write the wheel uncompressed, without the unused parts of Ray and their lines in its record."""
    with ZipFile(wheel) as old, ZipFile(target, "w") as new:
        for entry in old.infolist():
            if entry.filename.startswith(RAY_UNUSED):
                continue
            data = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines(keepends=True)
                data = "".join(line for line in lines if not line.startswith(RAY_UNUSED)).encode()
            new.writestr(entry, data, ZIP_STORED)  # keeps the entry's permissions


def pack(folder: Path, target: Path) -> None:
    """Write the files of a folder as one archive."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": DICTIONARY_BYTES}]
    with (
        lzma.open(target, "wb", filters=filters) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name)


def tracked_bytes() -> int:
    """Return the size of the files of the checkout."""
    command = ("git", "ls-files", "-z")
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)  # noqa: S603
    return sum((ROOT / name).lstat().st_size for name in listed.stdout.split("\0") if name)


def collect(folder: Path, python: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
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
        found, packed = work / "found", work / "packed"
        packed.mkdir()
        run(*pip, "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", found, *machine, *exact)
        for wheel in (own, *found.glob("*.whl")):
            without_unused(wheel, packed / wheel.name)
        sources = ("--no-binary", ":all:", "--no-build-isolation", COMPILED_THERE)
        (work / "sitecustomize.py").write_text(LIKE_CUDA)
        download = (*pip, "download", "-q", "--no-deps", "-c", "constraints.txt", "-d", packed, *sources)
        run("env", f"PYTHONPATH={work}", *download)
        sizes = {path.name: path.stat().st_size / 2**20 for path in packed.iterdir()}
        for name in sorted(sizes, key=sizes.__getitem__, reverse=True)[:8]:
            print(f"{sizes[name]:8.1f} MiB  {name}")
        pack(packed, folder / NAME)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help=f"receives {NAME}")
    parser.add_argument("--python", default="3.12", help="the version there (3.12)")
    args = parser.parse_args()
    folder: Path = args.folder.resolve()
    collect(folder, args.python)
    print(fitting((folder / NAME).stat().st_size, tracked_bytes()))


def fitting(parcel_bytes: int, tree_bytes: int) -> str:
    """Return a line of both sizes in MiB. Raises SystemExit if they are too much."""
    line = f"{parcel_bytes / 2**20:.1f} MiB and a checkout of {tree_bytes / 2**20:.1f} MiB"
    if parcel_bytes + tree_bytes > MIB_MAX << 20:
        raise SystemExit(f"{line}: more than {MIB_MAX}; take packages that are there into PRESENT")
    return line


if __name__ == "__main__":
    main()
