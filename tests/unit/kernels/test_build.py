"""The compiled library: made once, never half, and a clear error where it cannot be made."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest

from tidemill.kernels import dispatch
from tidemill.kernels.build import KernelUnavailable, build
from tidemill.kernels.dispatch import Operators

OPERATORS = len(fields(dispatch.Operators)) + 1  # and page_copy


@pytest.fixture
def compiler(tmp_path: Path, kernel_cache: Path, cpu: Operators) -> Path:
    """Answers like g++ and hands out the library made before; every compilation adds a line to `log`."""
    assert cpu.linear
    made = next(kernel_cache.glob("*.so"))
    script = tmp_path / "compiler"
    script.write_text(
        f"""#!/bin/sh
case "$*" in *--version*) echo some compiler; exit 0;; esac
cat > /dev/null
echo compiled >> {tmp_path}/log
for last; do :; done
cp {made} "$last"
"""
    )
    script.chmod(0o755)
    return script


def test_compiles_once(tmp_path: Path, compiler: Path) -> None:
    for _ in range(2):
        build(tmp_path / "cache", str(compiler))
    assert (tmp_path / "log").read_text().split() == ["compiled"]


def test_processes_that_start_together_compile_once(tmp_path: Path, compiler: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        started = [pool.submit(build, tmp_path / "cache", str(compiler)) for _ in range(4)]
        assert all(future.result() for future in started)
    assert (tmp_path / "log").read_text().split() == ["compiled"]
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".lock", ".so"]


def test_no_compiler_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(KernelUnavailable, match=r"install no-such-compiler, or pass --kernels reference"):
        build(tmp_path, "no-such-compiler")


def test_a_failed_compilation_leaves_nothing_behind(tmp_path: Path) -> None:
    broken = tmp_path / "compiler"
    broken.write_text('#!/bin/sh\ncase "$*" in *--version*) exit 0;; esac\necho no space left >&2\nexit 1\n')
    broken.chmod(0o755)
    with pytest.raises(KernelUnavailable, match="no space left"):
        build(tmp_path / "cache", str(broken))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["kernels.lock"]


def test_the_table_says_what_became_of_the_compiled_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what to do about it. Of Triton's variants, tests/triton."""

    def refused(_: Path) -> None:
        raise KernelUnavailable("install a compiler")

    found = dispatch.table(tmp_path).splitlines()[1:]
    assert {line.split()[0] for line in found} >= {"linear", "attention", "gated_delta", "moe_outer"}
    assert all(line.split()[1:4] == ["yes", "yes", "yes"] for line in found[:OPERATORS])
    monkeypatch.setattr(dispatch, "build", refused)
    found = dispatch.table(tmp_path).splitlines()[1:]
    assert all(line.split()[1:4] == ["yes", "yes", "missing"] for line in found[:OPERATORS])
    assert "install a compiler" in found[OPERATORS:]


def test_the_reference_needs_no_compiler(tmp_path: Path) -> None:
    assert dispatch.operators("reference", tmp_path / "never") is dispatch.REFERENCE
    assert not (tmp_path / "never").exists()
