"""What steps consist of: kernels, launches, collectives, copies and waits."""

from __future__ import annotations

import pytest
from measure.programs import Program, eager, graphs

from stepgraph.measure.trace.kineto import Activity, parse_events
from stepgraph.measure.trace.loop import TraceAccount, account_for
from stepgraph.measure.trace.result import short
from stepgraph.measure.trace.shares import COMPUTE, call_shares, group, group_shares, kernel_shares, wait_shares


def account(program: Program) -> TraceAccount:
    return account_for(parse_events(program.kineto()))


def test_kernels_by_share() -> None:
    first, *_ = shares = kernel_shares(account(eager(6, layers=8)))
    assert (first.name, first.a_step, first.us, first.us_a_step) == ("gemm", 32, pytest.approx(10), pytest.approx(320))
    assert sum(share.share for share in shares) == pytest.approx(1)
    assert not any("Memcpy" in share.name for share in shares)


def test_launches_by_call() -> None:
    graph, copy = call_shares(account(graphs(6)))
    assert (graph.name, graph.a_step, graph.activities) == ("cudaGraphLaunch", 1, 66)
    assert graph.host_us == pytest.approx(3) and graph.queue_us == pytest.approx(3 + 5)
    assert copy.queue_us == pytest.approx(5 + 66 * 10 + 65 + 1)  # behind the whole graph


@pytest.mark.parametrize(
    ("name", "kind", "belongs"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage)", "kernel", "collectives"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(...)", "kernel", "collectives"),
        ("one_shot_all_reduce_kernel", "kernel", "collectives"),
        ("void at::native::reduce_kernel<512, 1>", "kernel", COMPUTE),
        ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", "copies to the device"),
        ("Memcpy DtoH", "gpu_memcpy", "copies to the host"),
        ("Memcpy DtoD (Device -> Device)", "gpu_memcpy", "copies on the device"),
        ("Memset (Device)", "gpu_memset", "memsets"),
    ],
)
def test_groups(name: str, kind: str, belongs: str) -> None:
    assert group(Activity(name, kind, 0, 1, 0, 7, 1)) == belongs


def test_what_runs_alone_and_what_is_hidden() -> None:
    program = Program()
    for _ in range(6):
        program.launch("gemm", us=100)
        begin = program.device - 60
        program.launch("ncclDevKernel_AllReduce")
        kind, name, *_, gpu, key, node = program.ran.pop()
        program.ran.append((kind, name, begin, begin + 90, gpu, key, node))  # 60 of its 90 µs beside the gemm
        program.device = begin + 90
        program.read_back(us=5)
        program.wait()
    shares = {share.name: share for share in group_shares(account(program))}
    assert shares["collectives"].us == pytest.approx(90) and shares["collectives"].alone_us == pytest.approx(30)
    assert shares[COMPUTE].alone_us == pytest.approx(40)
    assert shares["copies to the host"].alone_us == pytest.approx(5)


def test_a_wait_and_how_long_the_device_idles_behind_it() -> None:
    (wait,) = wait_shares(account(eager(6, host_us=50)))
    assert (wait.name, wait.a_step) == ("cudaStreamSynchronize", 1)
    assert wait.idle_us == pytest.approx(4 + 50 + 3 + 5)  # it returns after 4; a launch takes 3, and 5 to begin
    assert wait.host_us > 500


def test_a_copy_to_pageable_memory_is_a_wait() -> None:
    program = Program()
    for _ in range(6):
        program.launch("gemm", us=100)
        program.read_back()
        name, start, _, thread, key = program.calls.pop()
        program.host = program.device + 6
        program.calls.append((name, start, program.host, thread, key))
    (wait,) = wait_shares(account(program))
    assert wait.name == "cudaMemcpyAsync" and wait.idle_us == pytest.approx(6 + 3 + 5)


def test_a_loop_without_waits_has_none() -> None:
    program = Program()
    for _ in range(8):
        program.launch("embed")
        for _ in range(10):
            program.launch("layer")
    assert wait_shares(account(program)) == []


def test_names_keep_both_ends() -> None:
    assert short("x" * 80) == "x" * 80
    assert short("a" * 60 + "b" * 60) == "a" * 40 + "…" + "b" * 39
