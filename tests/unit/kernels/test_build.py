"""The compiled library: made ahead, or once and never half, and a clear error where it cannot be made."""

import fcntl
import platform
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.support.kernels.cases import COMPUTE_DTYPES, random, same_bits, step
from tests.unit.kernels.codes.test_integers import integers
from tidemill.kernels import dispatch
from tidemill.kernels.attention.cpu import bind_attention
from tidemill.kernels.dispatch import Operators
from tidemill.kernels.linear.cpu import bind_linear, bind_pack
from tidemill.kernels.linear.stored import plain
from tidemill.kernels.shared import compiler as compiler_module
from tidemill.kernels.shared.build import KernelUnavailable, Library, build
from tidemill.kernels.shared.compiler import (
    KINDS,
    ahead_name,
    compile_ahead,
    compiler_path,
    found_ahead,
    kinds,
    library_name,
    native_target,
    sources,
)

WAITS_S_MAX = 60
"""A bound far beyond the slowness of any machine, after which a library that waits is an error."""

OPERATORS = len(dispatch.NAMES)


@pytest.fixture
def made(kernel_cache: Path, cpu: Operators) -> Path:
    """The library of these sources."""
    assert cpu.linear
    return kernel_cache / library_name(native_target(compiler_path("g++")).name)


@pytest.fixture
def compiler(tmp_path: Path, made: Path) -> Path:
    """Answers like g++ and hands out the library made before; every file adds its name to `log`."""
    script = tmp_path / "compiler"
    script.write_text(
        f"""#!/bin/sh
case "$*" in *--version* | *--help*) echo some compiler; exit 0;; esac
cat > /dev/null
for last; do :; done
basename "$last" >> {tmp_path}/log
cp {made} "$last"
"""
    )
    script.chmod(0o755)
    return script


def test_processes_that_start_together_compile_each_source_once(tmp_path: Path, compiler: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        started = [pool.submit(build, tmp_path / "cache", str(compiler)) for _ in range(4)]
        assert all(future.result() for future in started)
    files = (tmp_path / "log").read_text().split()
    assert len({*files}) == len(files) == len(sources()) + 1
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == ["", ".lock", ".so"]


def test_only_changed_sources_are_compiled(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_sources(tmp_path / "sources")
    monkeypatch.setattr(compiler_module, "FOLDER", tmp_path / "sources")
    for changed in ("linear/cpu.cpp", "linear/cpu.cpp", "shared/cpu.h"):
        build(tmp_path / "cache", str(compiler))
        (tmp_path / "log").unlink()
        file = tmp_path / "sources" / changed
        file.write_text(file.read_text() + "// changed\n")
        build(tmp_path / "cache", str(compiler))
        files = (tmp_path / "log").read_text().split()
        compiled = {file.partition("-")[0] for file in files}
        all_of_them = {source.parent.name for source in sources()}
        assert compiled == {"kernels", *(all_of_them if changed == "shared/cpu.h" else {"linear"})}


def test_library_that_is_there_waits_for_no_other_compilation(tmp_path: Path, compiler: Path) -> None:
    """A worker that restarted has waited 190 s for that of another version."""
    build(tmp_path / "cache", str(compiler))
    with (tmp_path / "cache" / "kernels.lock").open() as lock, ThreadPoolExecutor(1) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            assert pool.submit(build, tmp_path / "cache", str(compiler)).result(WAITS_S_MAX)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)


def test_no_compiler_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(KernelUnavailable, match=r"install no-such-compiler, or tidemill from a wheel"):
        build(tmp_path, "no-such-compiler")


def test_failed_compilation_leaves_nothing_behind(tmp_path: Path) -> None:
    broken = tmp_path / "compiler"
    broken.write_text(
        '#!/bin/sh\ncase "$*" in *--version* | *--help*) exit 0;; esac\necho no space left >&2\nexit 1\n'
    )
    broken.chmod(0o755)
    with pytest.raises(KernelUnavailable, match="no space left"):
        build(tmp_path / "cache", str(broken))
    assert sorted(
        path.relative_to(tmp_path / "cache").as_posix() for path in (tmp_path / "cache").rglob("*")
    ) == ["kernels.lock", "objects"]


X86 = """processor\t: 0
model name\t: some avx512f of yesterday
flags\t\t: fpu sse2 {flags}
bugs\t\t: avx512bw avx512dq avx512vl
"""
AVX2 = "avx2 fma"
AVX512 = f"{AVX2} avx512f avx512bw avx512dq avx512vl"


@pytest.fixture
def ahead(tmp_path: Path) -> Path:
    """Something for each kind of x86."""
    folder = tmp_path / "ahead"
    folder.mkdir()
    for kind in KINDS["x86_64"]:
        (folder / ahead_name("x86_64", kind)).touch()
    return folder


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        (f"{AVX512} avx512_bf16 avx512_vnni", "avx512_bf16"),
        (f"{AVX512} avx512_bf16", "avx512"),
        (AVX512, "avx512"),
        (AVX512.replace("avx512vl", ""), "avx2"),
        (AVX2, "avx2"),
        ("avx2", None),
        ("", None),
    ],
)
def test_cpu_gets_the_fastest_library_that_it_runs(ahead: Path, flags: str, kind: str | None) -> None:
    found = found_ahead(ahead, "x86_64", X86.format(flags=flags))
    assert found == (None if kind is None else ahead / ahead_name("x86_64", kind))


def test_library_of_other_sources_or_another_machine_is_not_found(ahead: Path, tmp_path: Path) -> None:
    assert found_ahead(ahead, "aarch64", X86.format(flags=AVX512)) is None
    assert found_ahead(tmp_path / "none", "x86_64", X86.format(flags=AVX512)) is None
    fastest = ahead / ahead_name("x86_64", "avx512")
    digest = fastest.stem.rpartition("-")[2]
    fastest.rename(ahead / fastest.name.replace(digest, digest[::-1]))
    assert found_ahead(ahead, "x86_64", X86.format(flags=AVX512)) == ahead / ahead_name("x86_64", "avx2")


def copy_sources(folder: Path) -> list[Path]:
    """Copy what kernels are made of, and return the headers."""
    headers = list(compiler_module.FOLDER.glob("*/*.h"))
    for source in (*headers, *sources()):
        copied = folder / source.relative_to(compiler_module.FOLDER)
        copied.parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(source, copied)
    return [folder / header.relative_to(compiler_module.FOLDER) for header in headers]


def test_name_of_a_library_depends_on_its_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = copy_sources(tmp_path)
    before = compiler_module.library_name("x86_64")
    monkeypatch.setattr(compiler_module, "FOLDER", tmp_path)
    assert compiler_module.library_name("x86_64") == before != compiler_module.library_name("aarch64")
    for changed in (*headers, sources()[0]):
        changed.write_text(changed.read_text() + "// changed\n")
        assert compiler_module.library_name("x86_64") != before
        before = compiler_module.library_name("x86_64")


def test_name_of_the_native_library_depends_on_the_cpu(tmp_path: Path) -> None:
    def named(march: str) -> str:
        script = tmp_path / march
        script.write_text(f'#!/bin/sh\nexec g++ "$@" -march={march}\n')
        script.chmod(0o755)
        return library_name(native_target(str(script)).name)

    assert named("icelake-server") != named("znver3") == named("znver3")


def test_machine_that_is_not_x86_has_one_library(tmp_path: Path) -> None:
    path = tmp_path / ahead_name("aarch64", "any")
    path.touch()
    assert found_ahead(tmp_path, "aarch64", "Features\t: fp asimd\n") == path


def test_prebuilt_library_needs_no_compiler_and_writes_nothing(tmp_path: Path, made: Path) -> None:
    folder = tmp_path / "ahead"
    folder.mkdir()
    for kind in kinds(platform.machine()):
        shutil.copy(made, folder / ahead_name(platform.machine(), kind))
    assert build(tmp_path / "cache", "no-such-compiler", folder).function("linear_panel")()
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_every_kind_of_cpu_computes_the_same_bits(tmp_path: Path, kernel_cache: Path) -> None:
    """A fleet may have unequal machines, of which some compile their kernels and others do not. Some factors
    are denormal, some products, and some sums."""
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = random(draw, 65, 257), random(draw, 300, 257), random(draw, 300)
    small = [part * torch.exp(random(draw, *part.shape) - 45) for part in (x, weight)]
    half = small[1].bfloat16()
    cache = (random(draw, 3, 2, 2, 64, 72) * 1e-38).bfloat16()
    rows = step([65], [100], torch.tensor([[2, 0, 1]], dtype=torch.int32))
    q = random(draw, 65, 4, 72)
    last = step([1], [130], torch.tensor([[2, 0, 1]], dtype=torch.int32))
    in_pages = random(draw, 1, 4, 64), (random(draw, 3, 2, 2, 64, 64) * 1e-38).bfloat16()
    prompt, prompt_cache = random(draw, 65, 4, 64), random(draw, 3, 2, 2, 64, 64).bfloat16()
    sinks = torch.tensor([2.0, -100.0, 30.0, -torch.inf])

    def run(library: Library) -> list[torch.Tensor]:
        linear = bind_linear(library)
        exact, paired = (bind_pack(library, dtype) for dtype in COMPUTE_DTYPES)
        return [
            linear(x, exact([plain(weight)], bias)),
            linear(x, paired([plain(weight.bfloat16())], bias)),
            linear(small[0], paired([plain(half)], None)),
            *(linear(x[:rows], paired([integers(300, 257)], bias)) for rows in (1, 3, 65)),
            *(bind_attention(library, dtype)(q, cache, rows, None, None) for dtype in COMPUTE_DTYPES),
            bind_attention(library, "bfloat16")(*in_pages, last, None, None),
            *(
                bind_attention(library, "bfloat16")(prompt, prompt_cache, rows, seen, None)
                for seen in (None, 40)
            ),
            bind_attention(library, "bfloat16")(20 * prompt, prompt_cache, rows, None, sinks),
        ]

    wanted = run(build(kernel_cache))
    assert {bool(flushed) for flushed in (wanted[2] == 0).flatten()} == {False, True}
    made = [path for path in compile_ahead(tmp_path) if "-kernels-" in path.name]
    runs = [path for path in made if _runs_here(path)]
    assert len(made) == len(kinds(platform.machine()))
    assert runs
    for path in made:  # the runtime of manylinux_2_28
        assert max(versions_wanted(path, b"GLIBC_2.")) <= 28
        assert max(versions_wanted(path, b"GLIBCXX_3.4.")) <= 24
    for path in runs:
        for found, expected in zip(run(Library(path)), wanted, strict=True):
            assert same_bits(found, expected), path.name


def versions_wanted(path: Path, prefix: bytes) -> set[int]:
    """Return the last numbers of the symbol versions that a library wants of its runtime."""
    return {0} | {int(number) for number in re.findall(re.escape(prefix) + rb"(\d+)", path.read_bytes())}


def _runs_here(path: Path) -> bool:
    """True if this CPU would be given `path`, were it alone."""
    alone = path.parent / path.stem
    alone.mkdir()
    shutil.copy(path, alone)
    cpuinfo = Path("/proc/cpuinfo").read_text()
    return found_ahead(alone, platform.machine(), cpuinfo) is not None


def test_table_reports_the_compiled_variant(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table also names the fix. For Triton's variants see tests/triton."""

    def refused(_: Path) -> None:
        raise KernelUnavailable("install a compiler")

    found = dispatch.table(kernel_cache).splitlines()[1:]
    assert {line.split()[0] for line in found} >= {"linear", "attention", "gated_delta", "moe_outer"}
    assert all(line.split()[1:4] == ["yes", "yes", "yes"] for line in found[:OPERATORS])
    monkeypatch.setattr(dispatch, "build", refused)
    found = dispatch.table(kernel_cache).splitlines()[1:]
    assert all(line.split()[1:4] == ["yes", "yes", "missing"] for line in found[:OPERATORS])
    assert "install a compiler" in found[OPERATORS:]
