"""`stepgraph explain`: its routes are the dispatcher's, and no file makes it fail other than in one line."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepgraph.cli.app import main
from stepgraph.cli.explain_config import LARGEST_FILE

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "explain.json"
STRIDE = {"rule": "vllm", "max": 100, "append_max": False}


def call(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["explain", *argv])
    return int(ended.value.code or 0)


@pytest.fixture
def report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Explains fields and returns what --json prints."""

    def explain(**fields: Any) -> dict[str, Any]:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(fields))
        assert call(str(path), "--json") == 0
        return json.loads(capsys.readouterr().out)

    return explain


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Explains text or fields that must be refused, and returns the line that says why."""

    def explain(content: str | bytes | dict[str, Any], *options: str) -> str:
        path = tmp_path / "config.json"
        raw = json.dumps(content) if isinstance(content, dict) else content
        path.write_bytes(raw.encode() if isinstance(raw, str) else raw)
        assert call(str(path), *options) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"error: {path}: ") and err.count("\n") == 1
        return err.removeprefix(f"error: {path}: ").strip()

    return explain


def config(query_lens: list[int], **ladder: Any) -> dict[str, Any]:
    decode = {"backend": "full", "query_lens": query_lens, "ladder": {**STRIDE, **ladder}}
    return {"max_requests": 100, "max_tokens": 400, "decode": decode}


def test_the_cliff_of_a_maximum_that_is_no_rung(report) -> None:
    uniform, mixed = report(**config([1]))["batches"]
    assert uniform["modes"] == {"FULL": 96, "EAGER": 4} and uniform["missed"] == 4
    assert uniform["cliffs"] == [
        "batches of 97 to 100 requests run eagerly (above_ladder): "
        "100 requests; the largest size of the ladder is 96; capture a size of at least 100"
    ]
    last = uniform["ranges"][-1]
    assert (last["first"], last["last"], last["mode"], last["rung"]) == (97, 100, "EAGER", None)
    assert mixed["reasons"] == {"disabled": 400} and mixed["cliffs"] == []
    assert report(**config([1], append_max=True))["batches"][0]["cliffs"] == []


@pytest.mark.parametrize(("rows", "tokens"), [(100, 400), (25, 100)])
@pytest.mark.parametrize("query_len", [2, 3, 4])
def test_decode_batches_that_miss_are_those_of_a_search(report, rows: int, tokens: int, query_len: int) -> None:
    stride = [1, 2, 4, *range(8, 100, 8)]
    held = [n for n in range(1, rows + 1) if n * query_len <= tokens]
    misses = [n for n in held if not [size for size in stride if size % query_len == 0 and size >= n * query_len]]
    fields = {**config([query_len], unit="tokens"), "max_requests": rows, "max_tokens": tokens}
    uniform = report(**fields)["batches"][0]
    assert uniform["batches"] == len(held) and uniform["missed"] == len(misses)
    eager = [n for one in uniform["ranges"] if one["mode"] == "EAGER" for n in range(one["first"], one["last"] + 1)]
    assert eager == misses


def test_what_misses_its_full_key_takes_the_relaxed_one(report) -> None:
    fields = config([4], unit="tokens") | {"prefill": {"backend": "breakable"}}
    uniform = report(**fields)["batches"][0]
    assert uniform["modes"] == {"FULL": 24, "BREAKABLE": 76} and uniform["missed"] == 76
    assert uniform["cliffs"][0].startswith("batches of 25 to 100 requests of 4 tokens take the relaxed key")
    assert (uniform["ranges"][-1]["rung"], uniform["ranges"][-1]["rung_unit"]) == (400, "tokens")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(st.sets(st.integers(1, 40), min_size=1), st.integers(1, 40), st.integers(0, 40))
def test_ranges_cover_every_batch_once(report, sizes: set[int], rows: int, more: int) -> None:
    full = {"backend": "full", "ladder": sorted(sizes)}
    for kind in report(max_requests=rows, max_tokens=rows + more, decode=full, prefill=full)["batches"]:
        covered = [n for one in kind["ranges"] for n in range(one["first"], one["last"] + 1)]
        assert covered == list(range(1, kind["batches"] + 1))
        assert all(one["rung"] is None or one["rung"] >= one["last"] for one in kind["ranges"])


def test_the_default_ceiling_of_prefill_is_the_chunk(report) -> None:
    mixed = report(max_requests=4, max_tokens=2050, prefill={"backend": "breakable"})["batches"][-1]
    assert mixed["modes"] == {"BREAKABLE": 2050} and mixed["ranges"][-1]["rung"] == 2050


def test_the_example_and_its_table_of_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(EXAMPLE), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [(row["phase"], row["asked"]) for row in report["backends"]] == [
        ("decode, 1 token a request", "full"),
        ("prefill and mixed", "full"),
    ]
    assert report["backends"][1]["gets"] == {
        "full": "breakable (full-prefill-needs-always)",
        "breakable": "breakable",
        "piecewise": "breakable (piecewise-needs-compile)",
        "disabled": "disabled",
    }
    (change,) = report["changes"]
    assert (change["rule"], change["severity"]) == ("full-prefill-needs-always", "warning")
    assert report["graphs"] == {"BREAKABLE": 42, "FULL": 15}
    assert any("97 to 100" in line for line in report["advice"])
    assert any("raise prefill.max_requests to 100" in line for line in report["advice"])
    assert report["batches"][0]["worst_padding"] == {"real": 9, "padded": 16, "unit": "requests", "share": 0.4375}


def test_the_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert call(str(EXAMPLE)) == 0
    text = capsys.readouterr().out
    for line in ("97 to 100", "its own", "full-prefill-needs-always", "worst padding: 9 → 16 requests (43.8%)"):
        assert line in text


def test_nothing_is_to_change_where_all_is_covered(monkeypatch, tmp_path: Path, capsys) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"max_requests": 2, "max_tokens": 4, "decode": {"backend": "full"}}')
    assert call(str(path)) == 0
    assert "nothing to change" in capsys.readouterr().out


def test_strict_refuses_a_downgrade(refused) -> None:
    line = refused(json.loads(EXAMPLE.read_text()), "--strict")
    assert "full-prefill-needs-always" in line and "flash (UNIFORM_BATCH)" in line


def test_full_with_never_names_the_backend(refused) -> None:
    fields = config([1]) | {"attention": [{"name": "torch", "support": "NEVER"}]}
    assert "attention backend torch (NEVER) cannot be recorded" in refused(fields)


GOOD = {"max_requests": 8, "max_tokens": 64}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        ('{"max_requests": NaN}', "NaN is no JSON number"),
        ('{"max_requests": 1, "max_requests": 2}', "'max_requests' is given twice"),
        ("[]", "the file must be an object, got []"),
        (" " * (LARGEST_FILE + 1), "larger than 1048576 bytes"),
        ({}, "max_requests must be a whole number from 1 to 65536, it is absent"),
        (GOOD | {"max_tokens": True}, "max_tokens must be a whole number"),
        (GOOD | {"max_tokens": 10**30}, "max_tokens must be a whole number"),
        (GOOD | {"max_tokens": 4}, "limits: 8 requests and 4 tokens"),
        (GOOD | {"lader": 1}, "unknown: lader; known here are max_requests, max_tokens, decode"),
        (GOOD | {"decode": 0}, "decode must be an object, got 0"),
        (GOOD | {"decode": {"backends": "full"}}, "unknown: decode.backends"),
        (GOOD | {"decode": {"backend": "half"}}, "decode.backend must be one of full, breakable, piecewise, disabled"),
        (GOOD | {"decode": {"backend": ["full"]}}, "decode.backend must be one of"),
        (GOOD | {"decode": {"query_lens": 4}}, "decode.query_lens must be a list"),
        (GOOD | {"decode": {"query_lens": ["4"]}}, "decode.query_lens must be a whole number"),
        (GOOD | {"decode": {"query_lens": [1] * 17}}, "a list of at most 16, it has 17"),
        (GOOD | {"decode": {"query_lens": [2, 2]}}, "must be distinct"),
        (GOOD | {"decode": {"ladder": "vllm"}}, "decode.ladder must be an object"),
        (GOOD | {"decode": {"ladder": []}}, "decode.ladder: ladder: no sizes"),
        (GOOD | {"decode": {"ladder": [1, 1.5]}}, "decode.ladder must be a whole number"),
        (GOOD | {"decode": {"ladder": {"sizes": [4, 4]}}}, "decode.ladder.sizes: ladder: size 4 is given more"),
        (GOOD | {"decode": {"ladder": {"rule": "vlm"}}}, "decode.ladder.rule must be one of vllm"),
        (GOOD | {"decode": {"ladder": {"rule": "sglang", "append_max": False}}}, "leave append_max out"),
        (GOOD | {"decode": {"ladder": {"unit": "rows"}}}, "decode.ladder.unit must be one of requests, tokens"),
        (GOOD | {"decode": {"ladder": {"unit": "tokens"}, "query_lens": [1, 2]}}, "for one query length"),
        (GOOD | {"decode": {"ladder": {"unit": "tokens"}, "query_lens": [99]}}, "multiple of the query length 99"),
        (GOOD | {"prefill": {"ladder": {"unit": "requests"}}}, "prefill.ladder.unit must be one of tokens"),
        (GOOD | {"prefill": {"ladder": {"append_max": 1}}}, "prefill.ladder.append_max must be true or false"),
        (GOOD | {"prefill": {"max_requests": 0}}, "prefill.max_requests must be a whole number"),
        (GOOD | {"prefill": {"pad_factor": "2"}}, "prefill.pad_factor must be a number"),
        (GOOD | {"prefill": {"pad_factor": 0.5}}, "pad_factor 0.5 must be at least 1"),
        (GOOD | {"lora_cases": [4, 0]}, "must ascend"),
        (GOOD | {"debug": "loud"}, "debug must be one of off"),
        (GOOD | {"attention": {}}, "attention must be a list"),
        (GOOD | {"attention": [{"name": "a"}]}, "attention[0].support must be one of NEVER"),
        (GOOD | {"attention": [{"name": "a\n", "support": "NEVER"}]}, "attention[0].name must be a name"),
        (GOOD | {"attention": [{"name": "a", "support": "ALWAYS", "max_query_len": 0}]}, "attention[0].max_query_len"),
        (
            GOOD | {"decode": {"ladder": list(range(1, 60001))}, "lora_cases": [0, 1]},
            "120020 graphs; at most 100000 are explained",
        ),
    ],
)
def test_a_wrong_file_is_one_line(refused, content: str | bytes | dict[str, Any], says: str) -> None:
    assert says in refused(content)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
fields_of = {
    "decode": ["backend", "ladder", "query_lens"],
    "prefill": ["backend", "ladder", "max_requests", "pad_factor", "pad_floor"],
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(st.data())
def test_no_value_in_any_field_brings_a_traceback(tmp_path: Path, data: st.DataObject) -> None:
    phase = data.draw(st.sampled_from(list(fields_of)))
    inner = {data.draw(st.sampled_from(fields_of[phase])): data.draw(json_values)}
    name = data.draw(st.sampled_from(["lora_cases", "attention", "debug", "warmups"]))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GOOD | {phase: inner, name: data.draw(json_values)}))
    assert call(str(path), "--json") in (0, 2)


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        assert call(str(path)) == 2
        assert capsys.readouterr().err.startswith(f"error: {path}: cannot be read: ")


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "padding.png"
    assert call(str(EXAMPLE), "--json", "--picture", str(picture)) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert call(str(EXAMPLE), "--picture", str(tmp_path / "no such folder" / "padding.png")) == 2
    assert "picture: " in capsys.readouterr().err


def test_a_picture_that_cannot_be_drawn(monkeypatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(EXAMPLE), "--picture", str(tmp_path / "padding.gif")) == 2
    assert "must end in .png" in capsys.readouterr().err
    found = builtins.__import__

    def without_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    assert call(str(EXAMPLE), "--picture", str(tmp_path / "padding.png")) == 2
    assert "pip install 'stepgraph[plot]'" in capsys.readouterr().err
