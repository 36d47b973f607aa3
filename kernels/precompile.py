"""Compile the Triton kernels of a model's steps on several processes, into Triton's cache.

python -m tidemill.kernels.precompile TARGET    reads kernels from its standard input
"""

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, NamedTuple

log = logging.getLogger(__name__)

_ONE_AT_A_TIME = Lock()
"""Held while launches of one thread do nothing: a process may start several engines."""


class Kernel(NamedTuple):
    """A kernel by module, name and digest of its source, and what it is compiled for, in Triton's JSON."""

    module: str
    name: str
    digest: str
    specialization: str


@dataclass(frozen=True, slots=True)
class Device:
    """The part of a driver that compiling needs: children leave the device alone."""

    target: Any

    def get_current_target(self) -> Any:  # noqa: ANN401 - Triton has no types
        return self.target

    def get_current_device(self) -> int:
        return 0


def compile_ahead(steps: Callable[[], object], processes_max: int) -> None:
    """Compile what `steps` launches on a device, if Triton's cache may lack it. This thread calls it once,
    and its launches do nothing: nothing may depend on what they compute.

    What a child fails to compile is left to the first launch, which raises its error.
    """
    kernels = sorted(_launched(steps))
    count = min(processes_max, -(-len(kernels) // 2))
    if count < 2:
        return
    triton: Any = import_module("triton")
    target = triton.runtime.driver.active.get_current_target()
    digest = sha256(json.dumps([triton.__version__, vars(target), kernels]).encode()).hexdigest()
    done = Path(triton.knobs.cache.dir) / f"tidemill-{digest}"
    if done.exists():
        return
    began_s = time.monotonic()
    children = [_compile_on_child(kernels[index::count], target) for index in range(count)]
    failed = sum(child.wait() != 0 for child in children)
    if failed:
        log.warning("%d processes failed: their kernels are left to compile one by one", failed)
    else:
        done.touch()
    log.info("compiled %d kernels on %d processes in %.1f s", len(kernels), count, time.monotonic() - began_s)


def _launched(steps: Callable[[], object]) -> set[Kernel]:
    """Return the kernels of `steps` that this process has not compiled."""
    triton: Any = import_module("triton")
    function, runtime, thread, found = triton.JITFunction, triton.knobs.runtime, get_ident(), set[Kernel]()

    def skip(self: Any, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        return run(self, *arguments, **(options | {"warmup": True} if get_ident() == thread else options))

    def note(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:  # noqa: A002, ANN401 - Triton's names
        if get_ident() == thread:
            digest = fn.jit_function.cache_key
            found.add(Kernel(fn.module, fn.name, digest, compile["specialization_data"]))
        return get_ident() == thread

    with _ONE_AT_A_TIME:
        run = function.run
        function.run, runtime.jit_cache_hook = skip, note
        try:
            steps()
        finally:
            function.run, runtime.jit_cache_hook = run, None
    return found


def _compile_on_child(kernels: list[Kernel], target: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tidemill.kernels.precompile", json.dumps(vars(target))]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)  # noqa: S603  our own command
    assert child.stdin is not None
    with child.stdin as pipe:
        json.dump(kernels, pipe)
    return child


def main(target: str) -> None:
    triton: Any = import_module("triton")
    compiler: Any = import_module("triton.backends.compiler")
    triton.runtime.driver.set_active(Device(compiler.GPUTarget(**json.loads(target))))
    for module, name, _, specialization in json.load(sys.stdin):
        getattr(import_module(module), name).preload(specialization)


if __name__ == "__main__":
    main(sys.argv[1])
