"""Compiles what Triton kernels a call launches for a Hopper GPU, without one: what the interpreter lets pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction, KernelInterface


class HopperDriver:
    """Stands in for the driver as far as compiling goes."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _for_hopper() -> Iterator[list[str]]:
    """Launches compile only. Yields the names of the kernels."""
    names: list[str] = []

    def get(kernel: JITFunction[Any], grid: Any) -> Callable[..., None]:
        def compile_only(*args: Any, **options: Any) -> None:
            kernel.run(*args, grid=grid, warmup=True, **options)
            names.append(kernel.fn.__name__)

        return compile_only

    real, before = KernelInterface.__getitem__, driver._active
    KernelInterface.__getitem__ = get
    driver.set_active(HopperDriver())
    try:
        yield names
    finally:
        KernelInterface.__getitem__ = real
        driver._active = before


def compiled_kernels(call: Callable[[], object]) -> list[str]:
    """The names of the kernels that a call launches, in order. Its tensors are the CPU's."""
    assert not torch.cuda.is_available(), "compile by running"
    with _for_hopper() as names:
        call()
    return names
