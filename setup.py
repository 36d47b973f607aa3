"""Makes the protobuf stubs when the package is built or installed; everything else is in pyproject.toml."""

from pathlib import Path

from grpc_tools import protoc
from setuptools import setup
from setuptools.command.build_py import build_py

SOURCE = Path("src")


class BuildPy(build_py):
    """Builds what the .proto files say before it looks for modules."""

    def run(self) -> None:
        protos = sorted(SOURCE.glob("tidemill/cluster/proto/*.proto"))
        arguments = [f"-I{SOURCE}", f"--python_out={SOURCE}", f"--pyi_out={SOURCE}"]
        if protoc.main(["protoc", *arguments, *(str(proto.relative_to(SOURCE)) for proto in protos)]):
            raise SystemExit("the .proto files do not compile")
        super().run()


setup(cmdclass={"build_py": BuildPy})
