"""A captured step that runs again and again in one launch: CUDA's WHILE node around the step's graph.

    clear the counters → while the value is not 0: the step (a child graph) → count, and set the value

The kernel behind the step is PTX, which the driver compiles: it knows `cudaGraphSetConditional` by itself, where
NVRTC's result would have to be linked with a library of the toolkit.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from stepgraph.runtime.errors import CaptureError, ReplayError
from stepgraph.runtime.platforms.base import LoopTerms
from stepgraph.runtime.platforms.cuda_driver import checked, libcuda, upload

_CONDITIONAL_NODE = 13
_WHILE = 1
_ASSIGN_DEFAULT = 1
_OUT_OF_MEMORY = 2

_AGAIN = """
.version 8.3
.target sm_{target}
.address_size 64

.extern .func cudaGraphSetConditional(.param .b64 handle, .param .b32 value);

.visible .entry again(.param .u64 control_p, .param .u64 done_p, .param .u64 handle_p, .param .u32 most_p)
{{
    .reg .pred %p<3>;
    .reg .b32 %r<5>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [control_p];
    ld.param.u64 %rd2, [done_p];
    ld.param.u64 %rd3, [handle_p];
    ld.param.u32 %r1, [most_p];
    ld.global.u32 %r2, [%rd1];          // halt
    ld.global.u32 %r3, [%rd1+4];        // steps so far
    add.u32 %r3, %r3, 1;
    st.global.u32 [%rd1+4], %r3;
    st.global.u32 [%rd2], %r3;
    setp.eq.u32 %p1, %r2, 0;
    setp.lt.u32 %p2, %r3, %r1;
    and.pred %p1, %p1, %p2;
    selp.u32 %r4, 1, 0, %p1;
    {{
    .param .b64 handle;
    .param .b32 value;
    st.param.b64 [handle], %rd3;
    st.param.b32 [value], %r4;
    call.uni cudaGraphSetConditional, (handle, value);
    }}
    ret;
}}
"""


class _Memset(ctypes.Structure):
    """The driver's CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("target", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_size", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Kernel(ctypes.Structure):
    """The driver's CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class _Conditional(ctypes.Structure):
    """The driver's CUgraphNodeParams with CUDA_CONDITIONAL_NODE_PARAMS in it: 256 bytes."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("reserved", ctypes.c_int * 3),
        ("handle", ctypes.c_uint64),
        ("kind", ctypes.c_int),
        ("size", ctypes.c_uint),
        ("bodies", ctypes.POINTER(ctypes.c_void_p)),  # the driver's array
        ("context", ctypes.c_void_p),
        ("unused", ctypes.c_byte * (232 - 32)),
        ("reserved_too", ctypes.c_longlong),
    )


class CudaLoop:
    """A graph of its own around a copy of the step's.

    graph: the captured one, whose kernels' memory must live as long. stream: on which the graph is brought to the
    device.

    Raises:
        CaptureError: the driver has no conditional nodes, or refuses the step in one; says which of its functions did.
        torch.OutOfMemoryError: no room for the executable graph.
    """

    def __init__(self, graph: int, terms: LoopTerms, stream: torch.cuda.Stream) -> None:
        device = terms.control.device
        self._device_index, self._executable = device.index, ctypes.c_void_p()
        whole, handle = ctypes.c_void_p(), ctypes.c_uint64()
        with torch.cuda.device(device):
            torch.cuda.mem_get_info(device)  # gives this thread torch's context
            context = ctypes.c_void_p()
            _call("cuCtxGetCurrent", ctypes.byref(context))
            _call("cuGraphCreate", ctypes.byref(whole), ctypes.c_uint(0))
            try:
                create = ctypes.byref(handle), whole, context, ctypes.c_uint(1), ctypes.c_uint(_ASSIGN_DEFAULT)
                _call("cuGraphConditionalHandleCreate", *create)
                body = _while(whole, handle, _clear(whole, terms.control, context), context)
                _fill(body, ctypes.c_void_p(graph), handle, terms, device)
                error = libcuda().cuGraphInstantiateWithFlags(ctypes.byref(self._executable), whole, ctypes.c_uint64(0))
                if error == _OUT_OF_MEMORY:
                    raise torch.OutOfMemoryError("the driver has no memory for the executable loop")
                if error:
                    raise _refused("cuGraphInstantiateWithFlags", error)
            finally:
                libcuda().cuGraphDestroy(whole)
            try:
                upload(self._executable.value or 0, stream.cuda_stream)
            except BaseException:
                self.release()
                raise

    def replay(self) -> None:
        """On the current stream."""
        if not self._executable:
            raise ReplayError("this loop was released with its graph; capture again before replaying it")
        stream = torch._C._cuda_getCurrentRawStream(self._device_index)
        checked(libcuda().cuGraphLaunch(self._executable, ctypes.c_void_p(stream)))

    def release(self) -> None:
        if self._executable:
            checked(libcuda().cuGraphExecDestroy(self._executable))
            self._executable = ctypes.c_void_p()


def _clear(graph: ctypes.c_void_p, control: torch.Tensor, context: ctypes.c_void_p) -> ctypes.c_void_p:
    node, nbytes = ctypes.c_void_p(), control.nbytes
    params = _Memset(control.data_ptr(), nbytes, 0, 4, nbytes // 4, 1)
    _call("cuGraphAddMemsetNode", ctypes.byref(node), graph, None, ctypes.c_size_t(0), ctypes.byref(params), context)
    return node


def _while(
    graph: ctypes.c_void_p, handle: ctypes.c_uint64, after: ctypes.c_void_p, context: ctypes.c_void_p
) -> ctypes.c_void_p:
    """Add the node behind `after`; returns its body, an empty graph."""
    node, params = ctypes.c_void_p(), _Conditional()
    params.type, params.kind, params.size = _CONDITIONAL_NODE, _WHILE, 1
    params.handle, params.context = handle.value, context.value
    _call("cuGraphAddNode", ctypes.byref(node), graph, ctypes.byref(after), ctypes.c_size_t(1), ctypes.byref(params))
    return ctypes.c_void_p(params.bodies[0])


def _fill(
    body: ctypes.c_void_p,
    step: ctypes.c_void_p,
    handle: ctypes.c_uint64,
    terms: LoopTerms,
    device: torch.device,
) -> None:
    child, node = ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuGraphAddChildGraphNode", ctypes.byref(child), body, None, ctypes.c_size_t(0), step)
    values = (
        ctypes.c_uint64(terms.control.data_ptr()),
        ctypes.c_uint64(terms.done.data_ptr()),
        handle,
        ctypes.c_uint(terms.most),
    )
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    params = _Kernel(function=_again(device.index))
    params.grid[:] = params.block[:] = (1, 1, 1)
    params.arguments = ctypes.cast(pointers, ctypes.c_void_p)
    add = ctypes.byref(node), body, ctypes.byref(child), ctypes.c_size_t(1), ctypes.byref(params)
    _call("cuGraphAddKernelNode_v2", *add)


@cache
def _again(index: int) -> int:
    """The kernel behind the step, on a device whose context is current."""
    target = min(torch.cuda.get_device_capability(index), (9, 0))  # newer devices take it too
    source = _AGAIN.format(target="".join(map(str, target))).encode()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(source))
    _call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(b"again"))
    return function.value or 0


def _call(name: str, *arguments: object) -> None:
    function = getattr(libcuda(), name, None)
    if function is None:
        raise CaptureError(f"this driver has no {name}; conditional graph nodes need one of CUDA 12.4 or newer")
    error = function(*arguments)
    if error:
        raise _refused(name, error)


def _refused(name: str, error: int) -> CaptureError:
    text = ctypes.c_char_p()
    libcuda().cuGetErrorName(ctypes.c_int(error), ctypes.byref(text))
    return CaptureError(f"the driver refuses a loop around this step: {name}, {(text.value or b'?').decode()}")
