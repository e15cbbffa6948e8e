"""The counting behind the launch census: what is an operation's own, and what a library adds to it."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from stepgraph.runtime.nodes import Dependency, GraphNode

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def census() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("stepgraph_benchmarks_census", BENCHMARKS / "census.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("_add_rms_norm", "_add_rms_norm"),
        ("void at::native::vectorized_elementwise_kernel<4, F<int>, std::array<char*, 1ul>>(int, F<int>)",
         "at::native::vectorized_elementwise_kernel"),
        ("std::enable_if<!false, void>::type internal::gemvx::kernel<int, P<int>>(P<int>)", "internal::gemvx::kernel"),
        ("void at::native::(anonymous namespace)::indexSelectSmallIndex<c10::BFloat16>(int)",
         "at::native::indexSelectSmallIndex"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT", "nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT"),
        ("", ""),
    ],
)  # fmt: skip
def test_short_names(census: ModuleType, name: str, short: str) -> None:
    assert census.short(name) == short


def test_a_step_is_counted_by_what_its_nodes_are_for(census: ModuleType) -> None:
    nodes = [
        ("kernel", "gather", "embedding"),
        ("kernel", "nvjet_splitK", "layers.0/qkv_projection"),
        ("kernel", "void cublasLt::splitKreduce_kernel<32>(int)", "layers.0/qkv_projection"),
        ("kernel", "_decode", "layers.0/attention"),
        ("memset", "", "layers.1/down_projection"),
        ("kernel", "gemv", "layers.1/down_projection"),
        ("kernel", "gemv", "lm_head"),
        ("kernel", "void reduce_kernel<1>(int)", "sampling/softmax"),
        ("memset", "", ""),
    ]
    graph = [
        GraphNode(i, kind, name, region, after=(Dependency(i - 1),) if i else ())
        for i, (kind, name, region) in enumerate(nodes)
    ]
    counted = census.census(graph)
    assert counted.layers == (2, 1)
    assert counted.around == {"embedding": 1, "lm_head": 1, "sampling/softmax": 1, "outside all regions": 1}
    assert counted.added == {"qkv_projection": 1, "down_projection": 1}
    assert (counted.own, counted.total) == (7, 9)
    listed = census.listing(graph)
    assert [row[3] for row in listed["rows"]][2] == "cublasLt::splitKreduce_kernel" and len(listed["rows"]) == 9
    assert listed["rows"][2][-2:] == [True, [1]]
