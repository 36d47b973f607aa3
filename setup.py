"""Build the protobuf stubs and, in a wheel, the compiled kernels; all other settings are in
pyproject.toml."""

import runpy
import shutil
import sys
from pathlib import Path

from grpc_tools import protoc
from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SOURCE = Path("src")
COMPILER = "g++"


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
            compile_ahead = runpy.run_path("kernels/shared/compiler.py")["compile_ahead"]
            compile_ahead(Path(self.build_lib, "tidemill/kernels/ahead"), COMPILER)
        else:
            sys.stderr.write(f"no {COMPILER}: machines that run this wheel need one for the CPU kernels\n")


class Wheel(bdist_wheel):
    """A wheel for this kind of machine and any Python 3, because the kernels do not use Python's ABI."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = shutil.which(COMPILER) is None

    def get_tag(self) -> tuple[str, str, str]:
        _, _, machine = super().get_tag()
        return "py3", "none", machine


setup(cmdclass={"build_py": BuildPy, "bdist_wheel": Wheel})
