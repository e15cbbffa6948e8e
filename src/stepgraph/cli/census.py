"""`stepgraph census`: what one decode step launches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepgraph.cli.options import default_device

if TYPE_CHECKING:
    from stepgraph.measure.count_step import StepCount
    from stepgraph.measure.result import Rows


@dataclass(frozen=True)
class CensusOptions:
    """The options of the command line; None where the default depends on the machine or the model."""

    model: str | None = None
    step: str | None = None
    rows: int = 1
    context: int = 512
    device: str | None = None
    operations: str | None = None
    sampler: str = "fused"
    by_transformers: bool = False
    picture: Path | None = None
    as_json: bool = False


def run_census(options: CensusOptions) -> None:
    """Count and print. Raises StepgraphError where the model, the step or an option cannot work."""
    from stepgraph.measure.count_step import census_result
    from stepgraph.measure.picture import require_picture
    from stepgraph.measure.show import show
    from stepgraph.runtime.errors import ConfigError
    from stepgraph.runtime.platforms import platform_for

    if options.picture is not None:
        require_picture(options.picture)
    if options.step is not None and options.model is not None:
        raise ConfigError("census: both a model and --step are given; give one of them")
    if options.rows < 1 or options.context < 1:
        raise ConfigError(f"{options.rows} rows at a context of {options.context}: both start at 1")
    device = default_device(options.device)
    platform_for(device)  # refuses a device that is not there
    counted, what = _count(options, device)
    result = census_result(counted, what, device)
    if options.picture is not None:
        draw(options.picture, result.tables[0])
    show(result, as_json=options.as_json)


def load_step(name: str) -> Callable[[], object]:
    """The step that `FILE.py:FUNCTION` or `MODULE:FUNCTION` makes: FUNCTION is called without arguments.

    Raises:
        ConfigError: there is no such function, what it makes is no function, or one of them takes arguments.
    """
    from stepgraph.runtime.errors import ConfigError

    where, colon, function = name.rpartition(":")
    if not colon or not function.isidentifier():
        raise ConfigError(f"step: {name!r} is not FILE.py:FUNCTION or MODULE:FUNCTION")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else import_module(where)
        make = getattr(module, function)
    except (ImportError, OSError, SyntaxError, ValueError, AttributeError) as error:
        raise ConfigError(f"step: {name} cannot be loaded: {error}") from None
    step: Any = make() if _takes_nothing(make) else None
    if not _takes_nothing(step):
        raise ConfigError(
            f"step: {name} must be a function without arguments that returns the step, itself one without arguments"
        )
    return step


def _takes_nothing(function: Any) -> bool:
    """Whether it can be called without arguments; true of what does not say."""
    try:
        signature(function).bind()
    except TypeError:  # arguments, or no function at all
        return False
    except ValueError:
        pass
    return True


def draw(path: Path, table: Rows) -> None:
    """A PNG: a bar for each operation, what libraries add behind it.

    Raises:
        ConfigError: it cannot be written.
    """
    from stepgraph.measure.picture import new_picture, save_picture

    figure = new_picture(9, 1.5 + 0.3 * len(table.rows))
    axes = figure.subplots()
    names = [f"{row[0]} ({row[1]})" for row in table.rows][::-1]
    own, added = ([row[column] for row in table.rows][::-1] for column in (2, 3))
    axes.barh(names, own, label=table.columns[2])
    axes.barh(names, added, left=own, label=table.columns[3])
    axes.set(xlabel="launches a step", title="what one step launches")
    axes.legend()
    save_picture(figure, path)


def _count(options: CensusOptions, device: str) -> tuple[StepCount, str]:
    from stepgraph.engine.errors import ModelError
    from stepgraph.measure.count_step import count_step
    from stepgraph.measure.decode import DecodeRows, is_ours, load_model
    from stepgraph.runtime.config import GraphConfig

    if options.step is not None:
        return count_step(load_step(options.step), device), f"the step {options.step}"
    rows, context = options.rows, options.context
    size = f"of {rows} {'row' if rows == 1 else 'rows'} at a context of {context}"
    directory = None if options.model is None else Path(options.model)
    if directory is not None and directory.is_dir() and (options.by_transformers or not is_ours(directory)):
        return _count_by_transformers(directory, options, device), f"a step {size} of {directory}, by transformers"
    if options.by_transformers:
        raise ModelError(f"{options.model or 'the demo model'}: transformers is given a Hugging Face directory")
    model = load_model(options.model, device=device, max_len=context + 1, operations=options.operations)
    decode = DecodeRows(model, GraphConfig(), rows=rows, context=context, sampler=options.sampler)
    import torch

    with torch.inference_mode():
        decode.stage(rows)
        found = count_step(decode.bare, device, decode.rewind)
    name = options.model or "the demo model"
    made_of = f"operations {model.operations.name}, attention {decode.core.attention.name}, sampler {options.sampler}"
    return found, f"a step {size} of {name} ({made_of})"


def _count_by_transformers(directory: Path, options: CensusOptions, device: str) -> StepCount:
    import torch

    from stepgraph.measure.count_step import count_step
    from stepgraph.measure.hugging_face import HuggingFaceStep

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    step = HuggingFaceStep(directory, device=device, dtype=dtype, rows=options.rows, context=options.context)
    return count_step(step, device)


def _from_file(path: Path) -> Any:
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module
