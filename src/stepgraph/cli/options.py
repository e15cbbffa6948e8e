"""What the commands' options may be, and how their errors end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Graphs(StrEnum):
    FULL = "full"
    BREAKABLE = "breakable"
    PIECEWISE = "piecewise"
    DISABLED = "disabled"
    VLLM_NONE = "NONE"
    VLLM_FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    VLLM_FULL = "FULL"
    VLLM_PIECEWISE = "PIECEWISE"
    VLLM_FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"


class Compiler(StrEnum):
    OFF = "off"
    INDUCTOR = "inductor"
    AOT_EAGER = "aot_eager"


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


class DType(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def not_empty(name: str | None) -> str | None:
    """A callback of options that name something: "" would be the current folder, or the default."""
    if name == "":
        raise typer.BadParameter("the name is empty; give one, or leave it out")
    return name


def default_device(asked: str | None) -> str:
    """The one that was asked for; otherwise cuda where it works."""
    import torch

    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


# What several commands have, as they say it in --help.
ModelOption = Annotated[
    str | None,
    typer.Option(
        help="A Hugging Face directory, a GGUF file, or a hub id (org/name). Default: the demo model.",
        callback=not_empty,
    ),
]
Where = Annotated[Device | None, typer.Option(help="Where to run. Default: cuda where it works, else cpu.")]
Compile = Annotated[Compiler, typer.Option(help="Compile the step between its breaks, with inductor: slow to start.")]
LadderOption = Annotated[str, typer.Option(help="Captured sizes: vllm, sglang, or a list such as 1,2,4,8.")]
Attention = Annotated[str | None, typer.Option(help="Attention backend. Default: the device's own.")]
Operations = Annotated[
    str | None, typer.Option(help="What computes a layer: fused, unfused or reference. Default: the device's own.")
]
Adapter = Annotated[
    Path | None, typer.Option(help="A directory with a LoRA adapter that PEFT saved, for all requests.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the whole result as JSON and nothing else.")]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Around a command: errors that a user can cause are one line, and status 2."""
    try:
        yield
        sys.stdout.flush()  # here and not at exit, where a broken pipe could no longer be caught
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the exit would try to flush once more
        raise typer.Exit(141) from None
    except Exception as error:
        from stepgraph.runtime.errors import StepgraphError  # here, because the runtime brings torch along

        if not isinstance(error, StepgraphError | OSError | UnicodeError):
            raise
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None
