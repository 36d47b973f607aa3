# pyright: basic
# transformers' classes have no usable types.
"""Prove that a model is served correctly: python -m tests.parity.architecture [NAME | FOLDER ...]

NAME is an architecture of architectures.py or one shape of it (llama, gpt_oss/narrow), none is all of them;
FOLDER is a Hugging Face folder with a small model. Each is compared with the class of transformers that its
config.json names, and every path through real engines with the cold one. The exit status is 0 if all of it
holds.
"""

import asyncio
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import transformers

from tests.support.parity.architectures import names, random_model, save
from tests.support.parity.proof import CHECKS, Subject
from tests.support.parity.sharded import sizes_of
from tests.support.parity.ways import WAYS, groups, journey_of, take
from tidemill.kernels.dispatch import operators

KERNELS = Path.home() / ".cache" / "tidemill"
Check = Callable[[], str]


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="NAME | FOLDER", default=list(names()))
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    broken = 0
    for given in parser.parse_args().models:
        shapes = [name for name in names() if given in {name, name.partition("/")[0]}]
        if not shapes and not Path(given).is_dir():
            parser.error(f"{given} is neither a folder nor one of {', '.join(names())}")
        for name in shapes or [given]:
            _say(name)
            with tempfile.TemporaryDirectory() as scratch:
                model = save(random_model(name), Path(scratch) / "model") if shapes else Path(given)
                broken += sum(not _holds(*check) for check in _checks(model, Path(scratch)))
    _say("all of it holds" if not broken else f"{broken} FAILED")
    return int(broken > 0)


def _checks(model: Path, scratch: Path) -> Iterator[tuple[str, Check]]:
    subject = Subject(model, operators("cpu", KERNELS), operators("cpu", KERNELS, "bfloat16"), scratch)
    for name, check in CHECKS.items():
        yield name, partial(check, subject)
    journey = journey_of(model, KERNELS, scratch, subject.ours.vocab_size)
    for name in WAYS:
        yield name, partial(take, name, journey)
    if 2 in sizes_of(model):
        yield groups.__name__, lambda: asyncio.run(groups(journey))


def _holds(name: str, check: Check) -> bool:
    try:
        found = check()
    except Exception as error:  # noqa: BLE001  the others are worth a look, whatever it is
        _say(f"  {name:<12} FAILED: {type(error).__name__}: {error}")
        return False
    _say(f"  {name:<12} {found}")
    return True


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201  what it is for


if __name__ == "__main__":
    sys.exit(main())
