"""Kernels that do nothing, launched and captured through the driver alone, so that no library stands in between."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from time import perf_counter_ns

import torch

from stepgraph.ops.overlap import can_overlap
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.platforms.cuda_driver import edges, libcuda, upload

THREADS = 128
"""Of a block; there is one block for each multiprocessor."""

_EMPTY = b".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry stepgraph_null()\n{\n ret;\n}\n"
# Lets the next kernel start, and waits for the one before, as kernels with programmatic edges must.
_WAITING = (
    b".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry stepgraph_null()\n"
    b"{\n griddepcontrol.launch_dependents;\n griddepcontrol.wait;\n ret;\n}\n"
)
_PROGRAMMATIC_SERIALIZATION = 6  # the driver's CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_THREAD_LOCAL = 1  # its CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class _Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute; the value is a union of 64 bytes, of which this one's is an int."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


def can_be_programmatic() -> bool:
    """Whether this card knows programmatic dependent launch: from compute capability 9.0 on."""
    return can_overlap("cuda")


def null_launcher(stream: int, *, waits: bool = False, programmatic: bool = False) -> Callable[[], None]:
    """A function that launches a null kernel on `stream` once.

    waits: the kernel lets the next one start and waits for the one before; without programmatic edges both do nothing.
    programmatic: the launch may start before the kernel in front has ended.

    Raises:
        ConfigError: the driver refuses to load the kernel; the function, where it refuses to launch it.
    """
    function = _function(torch.cuda.current_device(), waits)
    attribute = _Attribute(_PROGRAMMATIC_SERIALIZATION, 0, (ctypes.c_int * 16)(1))
    blocks = torch.cuda.get_device_properties().multi_processor_count
    config = _Config((blocks, 1, 1), (THREADS, 1, 1), 0, stream, ctypes.pointer(attribute), int(programmatic))
    launch, arguments = libcuda().cuLaunchKernelEx, (ctypes.byref(config), function, None, None)

    def launch_once() -> None:
        error = launch(*arguments)
        if error:
            raise ConfigError(f"the driver refuses to launch a null kernel: error {error}")

    return launch_once


def empty_call() -> None:
    """A call of the driver that does next to nothing: what ctypes itself takes."""
    libcuda().cuDriverGetVersion(_VERSION)


class NullGraph:
    """`count` launches in a row as an executable graph on the device.

    capture_us, instantiate_us: of the host. upload_us: until the graph is on the device.

    Raises:
        ConfigError: the driver refuses.
    """

    def __init__(self, launch: Callable[[], None], count: int, stream: int) -> None:
        driver, self._graph, self._executable = libcuda(), ctypes.c_void_p(), ctypes.c_void_p()
        self._stream = ctypes.c_void_p(stream)
        started = perf_counter_ns()
        _checked("begin a capture", driver.cuStreamBeginCapture_v2(self._stream, _THREAD_LOCAL))
        try:
            for _ in range(count):
                launch()
        finally:
            error = driver.cuStreamEndCapture(self._stream, ctypes.byref(self._graph))
        _checked("end a capture", error)
        captured = perf_counter_ns()
        instantiate = driver.cuGraphInstantiateWithFlags
        _checked("instantiate", instantiate(ctypes.byref(self._executable), self._graph, ctypes.c_ulonglong(0)))
        instantiated = perf_counter_ns()
        upload(self._executable.value or 0, stream)
        _checked("synchronize", driver.cuStreamSynchronize(self._stream))
        self.capture_us = (captured - started) / 1e3
        self.instantiate_us = (instantiated - captured) / 1e3
        self.upload_us = (perf_counter_ns() - instantiated) / 1e3

    def programmatic_edges(self) -> int:
        return sum(programmatic for _, _, programmatic in edges(self._graph.value or 0))

    def launch(self) -> None:
        error = libcuda().cuGraphLaunch(self._executable, self._stream)
        if error:
            raise ConfigError(f"the driver refuses to launch a graph: error {error}")

    def close(self) -> None:
        _checked("synchronize", libcuda().cuStreamSynchronize(self._stream))
        _checked("destroy a graph", libcuda().cuGraphExecDestroy(self._executable))
        _checked("destroy a graph", libcuda().cuGraphDestroy(self._graph))


_VERSION = ctypes.byref(ctypes.c_int())


@cache
def _function(device: int, waits: bool) -> ctypes.c_void_p:
    torch.cuda.current_stream(device).synchronize()  # makes the context, which a module is loaded into
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _checked("load a kernel", libcuda().cuModuleLoadData(ctypes.byref(module), _WAITING if waits else _EMPTY))
    _checked("find it", libcuda().cuModuleGetFunction(ctypes.byref(function), module, b"stepgraph_null"))
    return function


def _checked(what: str, error: int) -> None:
    if error:
        raise ConfigError(f"the driver refuses to {what}: error {error}")
