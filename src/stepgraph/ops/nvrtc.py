"""CUDA C++ compiled at run time, for the few kernels that Triton cannot express well enough."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

import torch

from stepgraph.ops.kernel_cache import cached
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.platforms.cuda_bindings import result_of

_checked = partial(result_of, error=ConfigError, what="CUDA")
_ALL_SHARED = 100  # per cent of a multiprocessor's memory that are not L1 cache, as far as it can be split so


@cache
def available() -> bool:
    """Whether the driver's and the compiler's bindings are installed (`pip install cuda-bindings`)."""
    try:
        return find_spec("cuda.bindings.driver") is not None and find_spec("cuda.bindings.nvrtc") is not None
    except ImportError:
        return False


def source(package: str, name: str) -> str:
    """A kernel's text: cuda_instructions.cu, and behind it the package's file of this name."""
    parts = (("stepgraph.ops", "cuda_instructions.cu"), (package, name))
    return "".join(files(where).joinpath(part).read_text(encoding="utf-8") for where, part in parts)


class CudaKernel:
    """One kernel whose only parameter is a struct, compiled for the current device.

    source: CUDA C++ without includes; `name` is declared extern "C". defines: become -D options.

    Raises:
        ConfigError: the compiler refuses; with its log.
    """

    def __init__(self, source: str, name: str, defines: Mapping[str, int]) -> None:
        from cuda.bindings import driver

        torch.cuda.current_stream()  # makes the context, which a module is loaded into
        self._driver = driver
        self._module = _checked(driver.cuModuleLoadData(compile_kernel(source, name, defines)))
        self._function = _checked(driver.cuModuleGetFunction(self._module, name.encode()))
        self._shared = 0  # dynamic shared memory that has been asked for

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        params: ctypes.Structure,
        *,
        shared_bytes: int = 0,
        overlap: bool = False,
    ) -> None:
        """Launch on torch's current stream. overlap: programmatically, before the kernel in front has ended."""
        driver = self._driver
        if shared_bytes > self._shared:
            attributes = driver.CUfunction_attribute
            attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(self._function, attribute, shared_bytes))
            # All that may overlap ask for the same split of a multiprocessor's memory, or one would wait for another.
            attribute = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            _checked(driver.cuFuncSetAttribute(self._function, attribute, _ALL_SHARED))
            self._shared = shared_bytes
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        if overlap:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        _checked(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(arguments), 0))


def compile_kernel(source: str, name: str, defines: Mapping[str, int]) -> bytes:
    """The binary of a kernel for the current device, from the cache where it is there. See `CudaKernel`."""
    from cuda.bindings import nvrtc

    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")
    macros = [f"-D{key}={int(value)}" for key, value in defines.items()]
    options = [f"--gpu-architecture={arch}", "--std=c++17", *macros]
    version = ".".join(map(str, _checked(nvrtc.nvrtcVersion())))
    return cached([source, name, *options, version], lambda: _compile_now(nvrtc, source, name, arch, options))


def _compile_now(nvrtc: Any, source: str, name: str, arch: str, options: Sequence[str]) -> bytes:
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []))
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(error):
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise ConfigError(f"kernel {name} cannot be compiled for {arch}: {log.decode(errors='replace').strip()}")
    binary = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, binary))
    nvrtc.nvrtcDestroyProgram(program)
    return binary
