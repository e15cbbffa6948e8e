"""cuda_projection.cu on a CPU: compiled by g++ with emulated.h, threads in turns. For tests without a GPU."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

from stepgraph.ops.fused import cuda_projection

HERE = Path(__file__).parent


class EmulatedKernel:
    """Stands in for `CudaKernel`. hidden: a tensor that the kernel in front writes last; NaN until the wait."""

    def __init__(self, folder: Path, defines: Mapping[str, int], late: bool, hidden: torch.Tensor | None) -> None:
        body = re.sub(r"extern __shared__ .* rings\[\];", "", cuda_projection.source("cuda_projection.cu"))
        body = body.replace("__shared__", "static")
        name = "_".join(str(int(value)) for value in defines.values())
        library = folder / f"{name}.so"
        if not library.exists():
            (folder / "kernel.inc").write_text(body, encoding="utf-8")
            macros = [f"-D{key}={int(value)}" for key, value in defines.items()]
            flags = ["-x", "c++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{folder}"]
            command = [shutil.which("g++") or "g++", *flags, *macros, str(HERE / "emulated.h"), "-o", str(library)]
            subprocess.run(command, check=True, timeout=120)
        self._launch = ctypes.CDLL(str(library)).launch
        self._launch.restype = ctypes.c_bool
        self._late, self._hidden = late, hidden

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        params: ctypes.Structure,
        *,
        shared_bytes: int = 0,
        overlap: bool = False,
    ) -> None:
        at, size, value = 0, 0, torch.empty(0)
        if self._hidden is not None:
            at, size = self._hidden.data_ptr(), self._hidden.nbytes
            value = self._hidden.clone()
            self._hidden.fill_(float("nan"))
        ended = self._launch(
            ctypes.byref(params), grid[0], grid[1], ctypes.c_bool(self._late),
            ctypes.c_void_p(at), ctypes.c_void_p(value.data_ptr()), ctypes.c_size_t(size),
        )  # fmt: skip
        assert ended, "some threads wait for each other for good"
