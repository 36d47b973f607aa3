"""The planted bugs, one file per part of the product."""

from pathlib import Path

from tests.mutations.planted import Planted, read

FILES = sorted(Path(__file__).parent.glob("*.diff"))
PLANTED: tuple[Planted, ...] = tuple(bug for file in FILES for bug in read(file.read_text()))
