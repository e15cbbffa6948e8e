"""Traces are read event by event, in chunks, and what is damaged is said in words."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepgraph.measure.trace import events as events_module
from stepgraph.measure.trace.errors import TraceError
from stepgraph.measure.trace.events import open_events

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def read(path: Path) -> tuple[dict, list]:
    with open_events(path) as (head, events):
        return dict(head), list(events)


@settings(deadline=None, max_examples=60)
@given(events=st.lists(VALUES, max_size=12), number=st.integers(), indent=st.sampled_from([None, 2]))
@example(events=[None, 0.0], number=0, indent=None)  # cut behind the point
def test_any_chunks_give_what_json_gives(
    tmp_path_factory: pytest.TempPathFactory, events: list, number: int, indent: int | None
) -> None:
    path = tmp_path_factory.mktemp("events") / "t.json"
    text = json.dumps({"schemaVersion": number, "traceEvents": events, "traceName": "x"}, indent=indent)
    path.write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events_module, "CHUNK", 3)
        assert read(path) == ({"schemaVersion": number}, events)


def test_a_bare_list_and_a_zipped_file(tmp_path: Path) -> None:
    bare, zipped = tmp_path / "bare.json", tmp_path / "zipped.json"  # told by what it begins with, not by its name
    bare.write_text("\n [ 1, {} ] ", encoding="utf-8")
    zipped.write_bytes(gzip.compress(b'{"traceEvents": [1, {}]}'))
    assert read(bare) == read(zipped) == ({}, [1, {}])


def test_bytes_that_are_no_text_and_control_characters(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b'[{"name": "\xff\x01"}]')
    assert read(path)[1] == [{"name": "\ufffd\x01"}]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "cut off"),
        ("hello", "no JSON"),
        ('{"traceEvents": [{"ph": "X"}', "cut off.* 28 of 28"),
        ('{"traceEvents": [{"ph": "X"}, {"na', "cut off"),
        ('{"traceEvents": [1 2]}', "Expecting ','"),
        ('{"traceEvents" [1]}', "Expecting ':'"),
        ('{"traceEvents": 3}', "no traceEvents"),
        ('{"a": 1, "b": [2]}', "no traceEvents"),
        ("[" * 100_000, "nested too deep"),
        ('{"a": ' + "9" * 5000 + ', "traceEvents": []}', "no JSON: Exceeds the limit"),
    ],
)
def test_what_is_damaged(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TraceError, match=why) as failed:
        read(path)
    assert "t.json" in str(failed.value)


def test_an_error_in_the_middle_does_not_read_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "CHUNK", 100)
    monkeypatch.setattr(events_module, "MOST", 1000)
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [{}, {"a" 1}' + ", {}" * 10_000, encoding="utf-8")
    with pytest.raises(TraceError, match="no JSON: Expecting ':' delimiter at character 26$"):
        read(path)


def test_a_zipped_file_that_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    whole = gzip.compress(json.dumps([{"name": str(i)} for i in range(1000)]).encode())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match="t.json.gz"):
        read(path)
    path.write_bytes(whole[:500] + b"\0" * 500 + whole[1000:])
    with pytest.raises(TraceError, match="t.json.gz"):
        read(path)


def test_events_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "CHUNK", 1 << 20)
    path = tmp_path / "t.json"
    with path.open("w", encoding="utf-8") as file:
        file.write('{"traceEvents": [{}')
        for _ in range(20):
            file.write(", ".join(["", *[json.dumps({"name": "x" * 1000})] * 1000]))
        file.write("]}")
    tracemalloc.start()
    with open_events(path) as (_, events):
        assert sum(1 for _ in events) == 20_001
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 20e6 and peak < 8 * events_module.CHUNK
