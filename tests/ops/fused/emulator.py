"""cuda_projection.cu on a CPU: compiled by g++ with emulated.h, threads in turns. For tests without a GPU."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class EmulatedKernel:
    """Stands in for `CudaKernel`. hide: `x` or `out`, whose first values are NaN until the wait.

    late: copies to shared memory happen when they are waited for, and not when they are asked for.
    """

    def __init__(self, folder: Path, defines: Mapping[str, int], *, late: bool, hide: str) -> None:
        text = files("stepgraph.ops.fused").joinpath("cuda_projection.cu").read_text(encoding="utf-8")
        body = re.sub(r"extern __shared__ .* rings\[\];", "", text)
        body = body.replace("__shared__", "static")
        library = folder / f"{'_'.join(str(int(value)) for value in defines.values())}.so"
        if not library.exists():
            (folder / "kernel.inc").write_text(body, encoding="utf-8")
            macros = [f"-D{key}={int(value)}" for key, value in defines.items()]
            flags = ["-x", "c++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{folder}"]
            command = [shutil.which("g++") or "g++", *flags, *macros, str(HERE / "emulated.h"), "-o", str(library)]
            subprocess.run(command, check=True, timeout=120)
        self._launch = ctypes.CDLL(str(library)).launch
        self._launch.restype = ctypes.c_bool
        self._late, self._hide, self._waits = late, hide, defines["PDL"]

    def launch(self, grid: tuple[int, int, int], threads: int, params: Any, **_: Any) -> None:
        size = params.rows * (params.x_row if self._hide == "x" else params.out_row) * self._waits
        ended = self._launch(
            ctypes.byref(params), grid[0], grid[1], ctypes.c_bool(self._late),
            ctypes.c_void_p(getattr(params, self._hide)), ctypes.c_size_t(size),
        )  # fmt: skip
        assert ended, "some threads wait for each other for good"
