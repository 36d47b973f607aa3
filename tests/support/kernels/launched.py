"""The launches of operators on meta tensors, as a CUDA graph captures them: nothing runs, and nothing can be
read."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.support.kernels.offline import Device

META = torch.device("meta")
"""The device of tensors with shapes and strides but no values: reading one is refused, as within a
capture."""


VIEWS = {"_unsafe_view", "detach"}


class Launch(NamedTuple):
    """`compiled` is what Triton compiles a kernel for: types, constants, and which numbers and addresses are
    multiples of 16."""

    kernel: str
    compiled: str
    grid: tuple[int, ...]
    tiles: tuple[TensorDescriptor, ...]


@contextmanager
def launching(monkeypatch: pytest.MonkeyPatch) -> Generator[list[Launch]]:
    """Inside, a launch neither compiles nor runs: call the operator with tensors of META. Yields launches."""
    launches: list[Launch] = []

    def record(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:  # noqa: ANN401
        assert not warmup
        *_, binder = self.device_caches[Device().capability]
        bound, specialization, _ = binder(*arguments, debug=False, instrumentation_mode="", **options)
        warps = {name: value for name, value in options.items() if name.startswith("num_")}
        tiles = tuple(value for value in bound.values() if isinstance(value, TensorDescriptor))
        launches.append(Launch(self.fn.__name__, f"{specialization} {warps}", grid, tiles))

    with monkeypatch.context() as patch:
        patch.setattr(triton.runtime.driver, "_active", Device())
        patch.setattr(JITFunction, "run", record)
        yield launches


class Counted(TorchDispatchMode):
    """Counts torch's operators that run on a device (not views, not memory), and the copies from and to the
    host among them. A copy that the host waits for is refused, and so is a read."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.to_device = self.to_host = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        is_copy = name in {"_to_copy", "copy_"}
        target, source = (
            (kwargs.get("device") or args[0].device, args[name == "copy_"].device) if is_copy else (0, 0)
        )
        if target != source:
            assert kwargs.get("non_blocking") or args[2:] == (True,), "a copy that the host waits for"
            self.to_device += target == META
            self.to_host += source == META
            if source == META:  # which has no values
                return args[0]
        aliases = [argument.alias_info for argument in func._schema.arguments if argument.alias_info]
        is_view = any(not alias.is_write for alias in aliases)
        is_there = META in [getattr(leaf, "device", leaf) for leaf in tree_leaves((args, kwargs))]
        self.count += is_there and not (is_view or "empty" in name or name in VIEWS)
        return func(*args, **kwargs)


@contextmanager
def capturing() -> Generator[None]:
    """Refuses what cannot be captured, or would be captured with the values of that moment: copies from the
    host, tensors made of Python's numbers, waits for a value."""
    with _Calls(), _Operators():
        yield


class _Calls(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        assert func not in {torch.tensor, torch.as_tensor}, "Python's numbers, copied to the device"
        if func in {torch.Tensor.__getitem__, torch.Tensor.__setitem__}:
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(place, list) for place in places), "places, copied to the device"
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        name = func.overloadpacket.__name__
        assert name not in {"lift", "lift_fresh", "nonzero", "masked_select", "_local_scalar_dense"}, name
        for leaf in tree_leaves((args, kwargs)):
            assert not isinstance(leaf, torch.Tensor) or leaf.device == META, f"{name} reads host memory"
        return func(*args, **(kwargs or {}))
