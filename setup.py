"""Give the version, build the protobuf stubs and, in a wheel, the compiled kernels; all other settings are
in pyproject.toml."""

import email
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from grpc_tools import protoc
from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SOURCE = Path("src")
COMPILER = "g++"
LAST_RELEASE = "0.2.0"
"""The version of sources without git and tags, such as the build context of the images."""


def version() -> str:
    """Return the version of a source distribution, or that of the newest tag of git.

    It is `0.2.0` at the tag v0.2.0, and `0.2.0+3.g1a2b3c4` three commits after it."""
    metadata = Path("PKG-INFO")
    if metadata.exists():
        return email.message_from_string(metadata.read_text())["Version"]
    git = shutil.which("git")
    command = [git, "describe", "--tags", "--long", "--match", "v[0-9]*"]
    described = subprocess.run(command, capture_output=True, text=True, check=False).stdout if git else ""  # noqa: S603
    match = re.fullmatch(r"v(.+)-(\d+)-(g[0-9a-f]+)\n", described)
    if match is None:
        return LAST_RELEASE
    tag, commits, commit = match.groups()
    return tag if commits == "0" else f"{tag}+{commits}.{commit}"


class BuildPy(build_py):
    """Generates the protobuf stubs before modules are collected, and compiles the CPU kernels for a wheel."""

    def run(self) -> None:
        protos = sorted(SOURCE.glob("tidemill/cluster/rpc/proto/*.proto"))
        arguments = [f"-I{SOURCE}", f"--python_out={SOURCE}", f"--pyi_out={SOURCE}"]
        if protoc.main(["protoc", *arguments, *(str(proto.relative_to(SOURCE)) for proto in protos)]):
            raise SystemExit("the .proto files do not compile")
        super().run()
        if self.editable_mode:  # sources may change, so kernels are compiled at their first use
            return
        if shutil.which(COMPILER):
            compiler = runpy.run_path(str(SOURCE / "tidemill/kernels/shared/compiler.py"))
            compiler["compile_ahead"](Path(self.build_lib, "tidemill/kernels/ahead"), COMPILER)
        else:
            sys.stderr.write(f"no {COMPILER}: machines that run this wheel need one for the CPU kernels\n")


class WithKernels(Distribution):
    """Files for this kind of machine, if there is a compiler for the kernels."""

    def has_ext_modules(self) -> bool:
        return shutil.which(COMPILER) is not None


class Wheel(bdist_wheel):
    """A wheel for this kind of machine and any Python 3, because the kernels do not use Python's ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, machine = super().get_tag()
        return "py3", "none", machine


setup(version=version(), distclass=WithKernels, cmdclass={"build_py": BuildPy, "bdist_wheel": Wheel})
