"""Compiles C++ into shared objects: for this CPU, or ahead for each kind that there is."""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# Needs nothing but Python: setup.py runs this file before anything is installed.

FOLDER = Path(__file__).resolve().parents[1]
# No fast-math, and no contraction: a loop must have the same bits vectorised or not (see cpu.h).
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)

AHEAD_FLAGS = ("-include", str(FOLDER / "shared/older_runtime.h"))
"""Flags of libraries that are compiled ahead: other machines may have an older runtime of C++."""


@dataclass(frozen=True, slots=True)
class Program:
    """One shared object: the files that match `sources` under `FOLDER`, and further flags."""

    name: str
    sources: str
    flags: tuple[str, ...] = ()


KERNELS = Program("kernels", "*/cpu.cpp", ("-fopenmp",))
PLACEMENT = Program("placement", "../cluster/router/*.cpp")
PROGRAMS = (KERNELS, PLACEMENT)
PROTOTYPE = re.compile(r'extern "C" (void|int64_t) (\w+)\(([^)]*)\)\s*\{')
REPLAY = "replay"
"""A generated function of each program: calls its functions one after the other (recording.py)."""

KINDS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx512_bf16": (
            "avx512_bf16",
            "avx512_vnni",
            "avx512f",
            "avx512bw",
            "avx512dq",
            "avx512vl",
            "avx2",
            "fma",
        ),
        "avx512": ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
        "avx2": ("avx2", "fma"),
    }
}
"""The kinds of CPU of each machine type, the fastest first, with their features by the names of /proc/cpuinfo
and, without underscores, of g++. Older CPUs get no library: without a fused multiply-add each one is a
function call."""


@dataclass(frozen=True, slots=True)
class Target:
    """A compiler, the CPU that it compiles for by name, and the flags for it."""

    compiler: str
    name: str
    flags: tuple[str, ...]


class KernelUnavailable(Exception):
    """The requested variant of an operator cannot run here. The message names what to install or to pass."""


def sources(program: Program = KERNELS) -> list[Path]:
    return sorted(path.resolve() for path in FOLDER.glob(program.sources))


def prototypes(program: Program = KERNELS) -> dict[str, tuple[str, list[str]]]:
    """Return the result and the arguments of each function, by name, as the sources have them."""
    found = {
        name: (result, [" ".join(argument.split()) for argument in arguments.split(",") if argument.strip()])
        for source in sources(program)
        for result, name, arguments in PROTOTYPE.findall(source.read_text())
    }
    return {name: found[name] for name in sorted(found)}


def replay_source(program: Program = KERNELS) -> str:
    """Return the source of REPLAY. `words` are the calls one after the other: the index of the function in
    `prototypes`, then its arguments as they lie in 64 bits. Results are dropped."""

    def taken(argument: str, index: int) -> str:
        if "*" in argument:
            return f"({argument[: argument.rindex('*') + 1]})words[{index}]"
        return f"words[{index}]" if argument.startswith("int64_t") else f"float_in(words[{index}])"

    cases = "".join(
        f"        case {at}: {name}({', '.join(map(taken, arguments, range(1, len(arguments) + 1)))});"
        f" words += {len(arguments) + 1}; break;\n"
        for at, (name, (_, arguments)) in enumerate(prototypes(program).items())
    )
    declared = "".join(
        f'extern "C" {result} {name}({", ".join(arguments)});\n'
        for name, (result, arguments) in prototypes(program).items()
    )
    return f"""#include <cstdint>
#include <cstring>
{declared}static float float_in(int64_t word) {{
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}}
extern "C" void {REPLAY}(const int64_t* words, const int64_t calls) {{
    for (int64_t call = 0; call < calls; call++) {{
        switch (*words) {{
{cases}        }}
    }}
}}
"""


def library_name(target: str, program: Program = KERNELS) -> str:
    """Return the name of the shared object of these sources and flags for `target`."""
    parts = (_object_name(source, target, program) for source in sources(program))
    digest = hashlib.sha256("\0".join((*parts, replay_source(program))).encode())
    return f"{program.name}-{digest.hexdigest()[:16]}.so"


def _object_name(source: Path, target: str, program: Program) -> str:
    digest = hashlib.sha256("\0".join((*FLAGS, *program.flags, target)).encode())
    for file in (*sorted(FOLDER.glob("shared/*.h")), *sorted(source.parent.glob("*.h")), source):
        digest.update(file.read_bytes())
    return f"{source.parent.name}-{digest.hexdigest()[:16]}.o"


def kinds(machine: str) -> dict[str, tuple[str, ...]]:
    return KINDS.get(machine, {"any": ()})


def ahead_name(machine: str, kind: str, program: Program = KERNELS) -> str:
    return f"{machine}-{kind}-{library_name(f'{machine} {kind}', program)}"


def compile_ahead(folder: Path, compiler: str = "g++") -> list[Path]:
    """One library of each program for each kind of CPU of this machine's architecture, the kernels first.
    Raises KernelUnavailable."""
    machine = platform.machine()
    folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    with tempfile.TemporaryDirectory() as objects:
        for program in PROGRAMS:
            for kind, has in kinds(machine).items():
                made.append(folder / ahead_name(machine, kind, program))
                target = Target(
                    compiler_path(compiler),
                    f"{machine} {kind}",
                    (*("-m" + feature.replace("_", "") for feature in has), *AHEAD_FLAGS),
                )
                compile_into(made[-1], Path(objects), target, program)
    return made


def found_ahead(folder: Path, machine: str, cpuinfo: str, program: Program = KERNELS) -> Path | None:
    """The fastest library in `folder` that the CPU of `cpuinfo` runs and that was made of these sources."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    has = {flag for name, _, flags in lines if name.strip() == "flags" for flag in flags.split()}
    for kind, needs in kinds(machine).items():
        path = folder / ahead_name(machine, kind, program)
        if has.issuperset(needs) and path.exists():
            return path
    return None


def compiler_path(compiler: str) -> str:
    path = shutil.which(compiler)
    if path is None:
        raise KernelUnavailable(
            f"no C++ compiler for the cpu kernels: install {compiler}, or tidemill from a wheel that has "
            "them (docs/install.md), or pass --kernels reference"
        )
    return path


def native_target(compiler: str) -> Target:
    """Return what -march=native stands for: different machines may share a cache directory."""
    options = _run([compiler, "-march=native", "-Q", "--help=target"])  # with --version, only that
    name = _run([compiler, "--version"]) + options
    return Target(compiler, name, ("-march=native",))


def compile_into(built: Path, objects: Path, target: Target, program: Program = KERNELS) -> None:
    """Compile each source into the folder `objects`, unless it is there, and link. A crash leaves no
    incomplete file."""
    command = [target.compiler, *FLAGS, *program.flags, *target.flags]

    def compiled(source: Path) -> Path:
        there = objects / _object_name(source, target.name, program)
        if not there.exists():
            made = Path(folder) / there.name
            _run([*command, "-c", str(source), "-o", str(made)])
            made.replace(there)
        return there

    objects.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=objects) as folder, ThreadPoolExecutor(os.cpu_count()) as threads:
        parts = [str(part) for part in threads.map(compiled, sources(program))]
        made = Path(folder) / built.name
        replay = replay_source(program)
        _run([*command, "-shared", *parts, "-x", "c++", "-", "-o", str(made)], replay)
        made.replace(built)


def _run(command: list[str], text: str = "") -> str:
    # The command is a compiler found on PATH with constant flags.
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise KernelUnavailable(
            f"{command[0]} cannot compile the cpu kernels, pass --kernels reference: {done.stderr[-2000:]}"
        )
    return done.stdout
