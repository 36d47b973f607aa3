"""Compiles C++ into shared objects: for this CPU, or ahead for each kind that there is."""

import hashlib
import platform
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

# Needs nothing but Python: setup.py runs this file before anything is installed.

FOLDER = Path(__file__).resolve().parents[1]
# No fast-math, and no contraction: a loop must have the same bits vectorised or not (see cpu.h).
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
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

KINDS = {
    "x86_64": {
        "avx512_bf16": ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"),
        "avx512": ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
        "avx2": ("avx2", "fma"),
    }
}
"""The kinds of CPU of each machine type, the fastest first, with their features by the names of /proc/cpuinfo
and, without underscores, of g++. Older CPUs get no library: without a fused multiply-add each one is a
function call."""


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
    return f"""#include <cstdint>
#include <cstring>
static float float_in(int64_t word) {{
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
    digest = hashlib.sha256("\0".join((*FLAGS, *program.flags, target)).encode())
    for source in (*sorted(FOLDER.glob("shared/*.h")), *sources(program)):
        digest.update(source.read_bytes())
    digest.update(replay_source(program).encode())
    return f"{program.name}-{digest.hexdigest()[:16]}.so"


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
    for program in PROGRAMS:
        for kind, has in kinds(machine).items():
            made.append(folder / ahead_name(machine, kind, program))
            cpu = ["-m" + feature.replace("_", "") for feature in has]
            compile_into(made[-1], [*cpu, *AHEAD_FLAGS], compiler_path(compiler), program)
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


def native_target(compiler: str) -> str:
    """Return what -march=native stands for: different machines may share a cache directory."""
    return _run([compiler, "-march=native", "-Q", "--help=target", "--version"])


def compile_into(built: Path, cpu: list[str], compiler: str, program: Program = KERNELS) -> None:
    """Compile the sources as one unit, which parses the shared header once. A crash leaves no incomplete
    library."""
    unit = "".join(f'#include "{source}"\n' for source in sources(program)) + replay_source(program)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        made = Path(folder) / built.name
        _run([compiler, *FLAGS, *program.flags, *cpu, "-x", "c++", "-", "-o", str(made)], unit)
        made.replace(built)


def _run(command: list[str], text: str = "") -> str:
    # The command is a compiler found on PATH with constant flags.
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise KernelUnavailable(
            f"{command[0]} cannot compile the cpu kernels, pass --kernels reference: {done.stderr[-2000:]}"
        )
    return done.stdout
