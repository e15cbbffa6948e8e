"""Traffic and latency curves from files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from measure.ladder_cases import AZURE

from stepgraph.measure.ladder_fit.histogram import Histogram
from stepgraph.measure.ladder_fit.requests import Requests
from stepgraph.measure.ladder_fit.step_times import load_step_times
from stepgraph.measure.ladder_fit.traffic import load_traffic
from stepgraph.runtime import BatchDescriptor, Dispatcher, GraphConfig, Ladder, Stats
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.keys import capture_keys

PREFIX = "(EngineCore_DP0 pid=7) INFO 10-08 12:00:00 [cuda_graph.py:123] "
VLLM = f"""
INFO 10-08 11:59:59 [loggers.py:320] Avg prompt throughput: 0.0 tokens/s, Running: 3 reqs
{PREFIX}**CUDAGraph Config Settings:**
{PREFIX}
{PREFIX}- Mode: CUDAGraphMode.FULL_AND_PIECEWISE
{PREFIX}- Capture sizes: [1, 2, 4, 8]
{PREFIX}| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |
{PREFIX}|-----------------|---------------|--------------|--------------|-------|
{PREFIX}| 3               | 4             | 1            | FULL         | 20    |
{PREFIX}| 7               | 8             | 1            | PIECEWISE    | 5     |
{PREFIX}| 415             | 415           | 0            | NONE         | 2     |
| 3               | 4             | 1            | CUDAGraphMode.FULL | 30    |
"""


def load(tmp_path: Path, text: str) -> Requests | Histogram:
    path = tmp_path / "traffic"
    path.write_text(text, encoding="utf-8")
    return load_traffic(path)


def test_azure() -> None:
    found = load_traffic(AZURE)
    assert isinstance(found, Requests) and len(found) == 1200
    assert (found.arrival_ns[0], found.prompt[0], found.output[0]) == (0, 374, 44)
    assert found.arrival_ns[1] == pytest.approx(4_314_579_000, abs=2000)  # 46.6805900 to 50.9951690 s
    first, second = found.halves()
    assert len(first) + len(second) == 1200 and second.arrival_ns[0] >= 0
    assert found.faster(4).arrival_ns[-1] == found.arrival_ns[-1] // 4


def test_azure_of_2024(tmp_path: Path) -> None:
    rows = "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01.017335+00:00,2399,6\n"
    found = load(tmp_path, f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    assert isinstance(found, Requests) and found.arrival_ns[1] == pytest.approx(1_007_405_000, abs=2000)


@pytest.mark.parametrize("count", [1, 3])
def test_mooncake(tmp_path: Path, count: int) -> None:
    lines = [
        json.dumps({"timestamp": at * 500, "input_length": 6758, "output_length": 500 + at, "hash_ids": [0, 1]})
        for at in reversed(range(count))
    ]
    found = load(tmp_path, "\n".join(lines))
    assert isinstance(found, Requests)
    assert found.arrival_ns.tolist() == [at * 500_000_000 for at in range(count)]
    assert found.decode_tokens.tolist() == [499 + at for at in range(count)]


def test_a_histogram(tmp_path: Path) -> None:
    found = load(tmp_path, '{"8": 3400, "7": 1200, "9": 0}')
    assert isinstance(found, Histogram) and dict(found.steps) == {7: 1200, 8: 3400}
    assert found.counts(8).tolist() == [0] * 7 + [1200, 3400]
    with pytest.raises(ConfigError, match="steps of 8 rows, and the largest size is 7"):
        found.counts(7)


def test_our_statistics(tmp_path: Path) -> None:
    config, stats = GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder((4, 8))), Stats()
    dispatcher = Dispatcher(config, 8, capture_keys(config, max_requests=8, max_tokens=64))
    for batch in (*[BatchDescriptor.decode(rows) for rows in (3, 3, 5)], BatchDescriptor.mixed(8, 2)):
        stats.record(dispatcher.dispatch(batch))
    found = load(tmp_path, json.dumps(stats.as_dict(), indent=1))
    assert isinstance(found, Histogram) and (dict(found.steps), found.left_out) == ({3: 2, 5: 1}, 1)


def test_vllm(tmp_path: Path) -> None:
    found = load(tmp_path, VLLM)
    assert isinstance(found, Histogram) and (dict(found.steps), found.left_out) == ({3: 50, 7: 5}, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "none of the kinds"),
        ("once upon a time", "none of the kinds"),
        ("[1]", "none of the kinds"),
        ('{"8": 1.5}', "1.5 is not whole"),
        ("{}", "no step of decoding"),
        ('{"8": "many"}', "whole numbers"),
        ('{"0": 5}', "at least one row"),
        ('{"8": -5}', "at least one row"),
        ('{"routes": [{"kind": "uniform"}]}', "a route without a number"),
        ('{"routes": 5}', "a route without a number"),
        ('{"8": 5', "Mooncake trace: request 1: JSONDecodeError"),
        ('{"timestamp": 1, "output_length": 5}', "Mooncake trace: request 1: KeyError: 'input_length'"),
        ("TIMESTAMP,ContextTokens\n", "a column GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "request 1: ValueError"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1\n", "request 1: TypeError"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1,-1\n", "that cannot be"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1,9" + "9" * 30, "that cannot be"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "x" * 200_000, "request 1: Error: field larger"),
        ("TIMESTAMP" + "x" * 200_000, "its header: field larger"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n0001-06-01,1,2\n2023-11-16,1,2\n", "more than a century"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 5}', "a time that cannot be"),
        ('{"timestamp": 1, "input_length": Infinity, "output_length": 5}', "OverflowError"),
        ('{"8": Infinity}', "whole numbers"),
        ('{"8": 9' + "9" * 30 + "}", "more than 1,000,000,000,000,000 steps"),
        ('{"routes": [{"kind": "mixed", "steps": Infinity}]}', "a route without a number"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_traffic(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_no_traffic(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_traffic(tmp_path / "missing")


def test_a_curve(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    path.write_text(json.dumps({"curve": {"what": "a step", "samples": {"1": [4.0, 9.0, 4.1], "3": [5.1]}}}))
    times = load_step_times(path)
    assert (times.ns.tolist(), times.measured, times.what) == ([0, 4_100_000, 4_600_000, 5_100_000], (1, 3), "a step")
    assert times.token_ns == 0
    assert times.upto(2).ns.tolist() == times.ns[:3].tolist() and times.upto(2).measured == (1,)
    path.write_text(json.dumps({"curve": {"what": "a step", "samples": {"1": [4.0], "3": [5.0]}, "token_ns": 23.5}}))
    assert load_step_times(path).upto(2).token_ns == 23.5
    for rows in (0, 4):
        with pytest.raises(ConfigError, match="where the latency curve ends"):
            times.upto(rows)


def test_the_curve_of_the_package() -> None:
    times = load_step_times()
    assert times.largest == 512 and times.measured[:64] == tuple(range(1, 65)) and "H200" in times.what
    assert 4e6 < times.ns[1] < 5e6 and 20 < times.token_ns < 40


def test_a_curve_without_its_start(tmp_path: Path) -> None:
    (tmp_path / "curve.json").write_text('{"curve": {"what": "", "samples": {"2": [1]}}}')
    with pytest.raises(ConfigError, match="must start at size 1"):
        load_step_times(tmp_path / "curve.json")


def test_context_is_the_mean_over_decoded_tokens() -> None:
    prompt, output = np.array([100, 10, 7]), np.array([11, 31, 1])
    assert Requests(np.zeros(3, np.int64), prompt, output).mean_context == (10 * 105 + 30 * 25) / 40
    assert Requests(np.zeros(3, np.int64), prompt, np.ones(3, np.int64)).mean_context == 0


def test_halves_are_counted_from_the_middle() -> None:
    times = np.array([0, 40, 60, 100])
    first, second = Requests(times, times, times).halves()
    assert (first.arrival_ns.tolist(), second.arrival_ns.tolist()) == ([0, 40], [10, 50])
