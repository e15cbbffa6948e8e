"""The counting behind the launch census: what is an operation's own, and what a library adds to it."""

import pytest

from stepgraph.measure.census import by_kernel, census, is_added, listing, short
from stepgraph.runtime.nodes import Dependency, GraphNode


@pytest.mark.parametrize(
    ("name", "expected"),
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
def test_short_names(name: str, expected: str) -> None:
    assert short(name) == expected


def test_a_step_is_counted_by_what_its_nodes_are_for() -> None:
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
    counted = census(graph)
    assert counted.layers == (2, 1)
    assert counted.around == {"embedding": 1, "lm_head": 1, "sampling/softmax": 1, "outside all regions": 1}
    assert counted.added == {"qkv_projection": 1, "down_projection": 1}
    assert counted.operations == {"qkv_projection": 1, "attention": 1, "down_projection": 1}
    assert counted.types == {"kernel": 7, "memset": 2}
    assert (counted.own, counted.total) == (7, 9)
    listed = listing(graph)
    assert [row[3] for row in listed["rows"]][2] == "cublasLt::splitKreduce_kernel" and len(listed["rows"]) == 9
    assert listed["rows"][2][-2:] == [True, [1]]


def test_what_libraries_add_is_told_from_a_reduction_and_a_copy_of_the_model() -> None:
    def one(kind: str, name: str, region: str = "layers.3/input_layernorm") -> GraphNode:
        return GraphNode(0, kind, name, region)

    assert is_added(one("kernel", "flash::flash_fwd_splitkv_combine_kernel<F>(P)"))
    assert is_added(one("memset", "", "lm_head"))
    assert is_added(one("event_record", "", "layers.3/all_reduce"))
    assert is_added(one("wait_event", "", "sampling/gather"))
    counted = census([one("kernel", "nccl", "layers.0/all_reduce"), one("event_record", "", "layers.0/all_reduce")])
    assert (counted.own, counted.total, counted.launches) == (1, 2, 1)
    assert not is_added(one("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "layers.3/all_reduce"))
    assert not is_added(one("kernel", "void at::native::reduce_kernel<512, 1, MeanOps<float>>(MeanOps<float>)"))
    assert not is_added(one("memcpy", ""))
    assert not is_added(one("operator", "aten.mm.default"))
    assert not is_added(one("memset", "", "sampling"))


def test_the_usual_count() -> None:
    nodes = [GraphNode(i, "kernel", "k", f"layers.{i}/norm") for i in range(32)]
    assert census(nodes).usual == 330
    assert by_kernel([*nodes, GraphNode(32, "memset", "", "")]) == {
        ("kernel", "k", False): 32,
        ("memset", "", False): 1,
    }
