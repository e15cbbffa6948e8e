"""What functions of cuda.bindings answer, as values and errors."""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import Any

import pytest

from stepgraph.runtime import CaptureError
from stepgraph.runtime.platforms.cuda_bindings import load_driver, result_of


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


@pytest.mark.parametrize(("values", "expected"), [((), None), ((5,), 5), (([],), []), ((None, 2), [None, 2])])
def test_what_stands_behind_the_status(values: tuple[Any, ...], expected: object) -> None:
    assert result_of((Status.CUDA_SUCCESS, *values), CaptureError, "cuFunction") == expected


def test_an_error_has_the_status_by_name() -> None:
    with pytest.raises(CaptureError, match="^cuFunction: CUDA_ERROR_INVALID_VALUE$"):
        result_of((Status.CUDA_ERROR_INVALID_VALUE, 5), CaptureError, "cuFunction")


def test_without_the_package_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert load_driver() is None
