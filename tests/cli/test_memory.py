"""`stepgraph memory` and `stepgraph plan memory`: what they print, and what they refuse in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli.one_adapter import write_one_projection

from stepgraph.cli.app import main
from stepgraph.runtime.memory.estimate import Fit
from stepgraph.runtime.memory.profile import DeviceProfile, save_profile

MIB, GIB = 1 << 20, 1 << 30
SMALL = ("--device", "cpu", "--ladder", "1,2", "--max-num-seqs", "2", "--max-model-len", "128")


def call(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    return int(ended.value.code or 0)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    pool = Fit({"one": 10.0 * MIB, "logits": 2.0, "activations": 1.0, "graphs": 0.5 * MIB})
    one = DeviceProfile(
        device="a device",
        total_bytes=100 * GIB,
        measured_with={"torch": "2"},
        driver_before=600 * MIB,
        loaded=50 * MIB,
        workspaces=64 * MIB,
        num_sms=132,
        pool={"prefill": pool, "decode": pool},
        driver=Fit({"one": 2.0 * MIB, "nodes": 1000.0}),
        nodes={kind: Fit({"one": 10.0, "layers": 10.0}) for kind in ("prefill", "decode")},
    )
    save_profile(one, tmp_path / "profile.json")
    save_profile(replace(one, total_bytes=10 * GIB), tmp_path / "small.json")
    return tmp_path / "profile.json"


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    """For the demo model."""
    return write_one_projection(tmp_path / "adapter")


class TestMemory:
    @pytest.fixture
    def report(self, demo_model: Path, capsys: pytest.CaptureFixture[str], profile: Path) -> dict[str, Any]:
        assert call("memory", *SMALL, "--profile", str(profile), "--json") == 0
        return json.loads(capsys.readouterr().out)

    def test_every_row_is_in_the_sum(self, report: dict[str, Any]) -> None:
        rows = {row["name"]: row["bytes"] for row in report["rows"] if row["of"] is None}
        assert sum(rows.values()) == report["total_bytes"]
        assert rows["weights and rotary tables"] > 4 * 134_000_000
        assert rows["penalty counts"] == 2 * 49152 * 4
        assert rows["decode graphs: pool"] == report["families"]["decode"]["pool_bytes"] > 0
        assert report["residual_bytes"] is None and report["device"] is None  # the tape has no figure of its own
        assert [(row["name"], row["bytes"]) for row in report["rows"] if row["of"]] == [
            ("logits of the largest decode step", 2 * 49152 * 4)
        ]

    def test_estimates_stand_beside_what_was_observed(self, report: dict[str, Any]) -> None:
        rule, own = report["estimates"]
        assert rule["name"] == "two-sample rule" and own["name"] == "profile of a device"
        observed = sum(graph["pool_bytes"] + graph["driver_bytes"] for graph in report["graphs"])
        assert rule["observed_bytes"] == own["observed_bytes"] == observed

    def test_the_table_and_the_picture(
        self, demo_model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        pytest.importorskip("matplotlib")
        picture = tmp_path / "m.png"
        assert call("memory", *SMALL, "--picture", str(picture)) == 0
        out = capsys.readouterr().out
        assert "coverage of 1 to 2 requests: all have graphs" in out and "coverage of 1 to 128 tokens" in out
        assert "penalty counts" in out and "two-sample rule" in out and "prefill" in out
        assert picture.read_bytes().startswith(b"\x89PNG")

    def test_a_picture_that_cannot_be_is_refused_before_the_model_loads(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert call("memory", "--model", "/nowhere", "--picture", "m.pdf") == 2
        assert "must end in .png" in capsys.readouterr().err

    def test_so_is_a_profile_that_cannot_be_read(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert call("memory", "--model", "/nowhere", "--profile", "/none") == 2
        assert "profile: /none cannot be read" in capsys.readouterr().err

    def test_and_one_that_is_no_object(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        (tmp_path / "profile.json").write_text("[1]", encoding="utf-8")
        assert call("memory", "--model", "/nowhere", "--profile", str(tmp_path / "profile.json")) == 2
        assert "cannot be read: it holds no JSON object" in capsys.readouterr().err


class TestCompiledAndWithAnAdapter:
    def report(self, capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
        assert call(*argv, "--json") == 0
        return json.loads(capsys.readouterr().out)

    def test_seconds_of_compiling_are_apart(self, demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        report = self.report(capsys, "memory", *SMALL, "--graphs", "piecewise", "--compile", "aot_eager")
        families, total = report["families"].values(), report["compile"]
        assert sum(family["compile_seconds"] for family in families) == pytest.approx(total["seconds"])
        assert {graph["compile_seconds"] > 0 for graph in report["graphs"]} == {True}
        assert total["distinct"] < total["pieces"] and report["seconds"] > total["seconds"]

    def test_what_was_compiled_is_in_the_table(self, demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        few = (*SMALL, "--graphs", "FULL_DECODE_ONLY", "--compile", "aot_eager")
        assert call("memory", *few) == 0
        out = capsys.readouterr().out
        assert "compiled with aot_eager: " in out and " pieces in " in out

    def test_graphs_with_the_adapter_and_its_slot_are_rows(
        self, demo_model: Path, capsys: pytest.CaptureFixture[str], adapter: str
    ) -> None:
        report = self.report(capsys, "memory", *SMALL, "--adapter", adapter)
        assert set(report["families"]) == {"prefill with adapters", "decode with adapters"}
        assert {row["name"] for row in report["rows"]} >= {"adapters", "decode with adapters graphs: pool"}
        assert report["compile"] is None

    def test_so_they_are_in_a_plan(
        self, demo_model: Path, capsys: pytest.CaptureFixture[str], adapter: str, profile: Path
    ) -> None:
        plan = ("plan", "memory", str(demo_model), "--profile", str(profile), "--dtype", "float32")
        alone = self.report(capsys, *plan)
        report = self.report(capsys, *plan, "--adapter", adapter)
        measured = self.report(capsys, "memory", *SMALL, "--adapter", adapter)
        slot = {row["name"]: row["bytes"] for row in measured["rows"]}["adapters"]
        assert {row["name"]: row["bytes"] for row in report["rows"]}["adapters"] == slot
        assert report["graphs"] == {f"{name} with adapters": number for name, number in alone["graphs"].items()}
        assert sum(report["graphs"].values()) == 30 + 35
        driver = [{row["name"]: row["bytes"] for row in one["rows"]}["graphs: driver"] for one in (alone, report)]
        assert driver[1] - driver[0] == (30 + 35) * 30 * 8 * 1000  # graphs, layers, launches a layer, bytes a node
        assert alone["notes"] == [] and "their launches are in it" in report["notes"][0]
        assert call(*plan, "--adapter", adapter) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "35 decode with adapters" in out and "Not in the prediction" in out

    def test_what_a_plan_does_not_predict_is_said(
        self, demo_model: Path, capsys: pytest.CaptureFixture[str], profile: Path
    ) -> None:
        plan = ("plan", "memory", str(demo_model), "--profile", str(profile), "--compile", "aot_eager")
        whole, pieces = (self.report(capsys, *plan, "--graphs", graphs)["notes"] for graphs in ("full", "piecewise"))
        assert len(whole) == 1 and "not compiled" in whole[0]
        assert pieces[0] == whole[0] and "each segment an executable" in pieces[1]
        eager = self.report(capsys, *plan, "--graphs", "disabled")
        assert (eager["notes"], eager["graphs"]) == ([], {})

    def test_an_adapter_that_is_none_is_refused_before_the_model_loads(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, profile: Path
    ) -> None:
        for argv in (
            ("memory", "--model", "/nowhere"),
            ("plan", "memory", "llama-3-8b", "--profile", str(profile)),
            ("verify",),
        ):
            assert call(*argv, "--adapter", str(tmp_path)) == 2
            assert "adapter_config.json is missing; the directory of an adapter needs it" in capsys.readouterr().err


class TestPlan:
    def plan(self, capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
        assert call("plan", "memory", *argv, "--json") == 0
        return json.loads(capsys.readouterr().out)

    def test_the_8b_shape(self, capsys: pytest.CaptureFixture[str], profile: Path) -> None:
        report = self.plan(capsys, "llama-3-8b", "--profile", str(profile), "--graphs", "FULL_DECODE_ONLY")
        rows = {row["name"]: row["bytes"] for row in report["rows"]}
        assert rows["weights and rotary tables"] == 2 * 8_030_261_248 + 2 * 8192 * 128 * 2
        assert rows["penalty counts"] == 256 * 128256 * 4
        graphs = 35  # vLLM's ladder up to 256
        assert rows["graphs: driver"] == 2 * MIB + graphs * 330 * 1000
        logits, widths = 256 * 128256 * 2, 3 * 14336 + 4 * 4096 + (64 + 16) * 128
        assert rows["graphs: pool"] == 10 * MIB + 2 * logits + 256 * widths * 2 + (graphs - 1) * MIB // 2
        assert rows["context, kernels and libraries"] == (600 + 50 + 64) * MIB and rows["margin"] == 256 * MIB
        eager = 10 * MIB + 2 * logits + 512 * widths * 2  # chunk_tokens
        assert rows["eager steps, at most"] == eager and rows["shared outputs"] == 256 * 8
        assert rows["attention workspace"] > 0
        assert report["taken_bytes"] == sum(rows.values()) and report["block_bytes"] == 2 * MIB
        assert report["kv_blocks"] == (int(100 * GIB * 0.9) - report["taken_bytes"]) // (2 * MIB)
        assert report["kv_tokens"] == 16 * report["kv_blocks"]

    def test_a_smaller_ladder_leaves_more(self, capsys: pytest.CaptureFixture[str], profile: Path) -> None:
        few, many = (
            self.plan(capsys, "llama-3-8b", "--profile", str(profile), "--max-num-seqs", rows) for rows in ("64", "512")
        )
        assert few["kv_blocks"] > many["kv_blocks"]

    def test_a_model_that_does_not_fit_leaves_nothing(self, capsys: pytest.CaptureFixture[str], profile: Path) -> None:
        small = str(profile.with_name("small.json"))
        assert call("plan", "memory", "llama-3-8b", "--profile", small, "--json") == 2
        said = capsys.readouterr()
        assert json.loads(said.out)["kv_blocks"] == 0
        assert "too little for a KV cache of two blocks; lower max_num_seqs" in said.err  # 1.0 would not do
        assert call("plan", "memory", "llama-3-8b", "--profile", str(profile), "--memory-fraction", "0.1") == 2
        assert "; raise the memory fraction by 0.0" in capsys.readouterr().err

    def test_it_prints_a_table(self, capsys: pytest.CaptureFixture[str], profile: Path) -> None:
        assert call("plan", "memory", "llama-3.2-1b", "--profile", str(profile)) == 0
        assert "left for the KV cache" in capsys.readouterr().out

    def test_of_a_gguf_file(self, demo_model: Path, capsys: pytest.CaptureFixture[str], profile: Path) -> None:
        report = self.plan(capsys, str(demo_model), "--profile", str(profile))
        assert report["kv_blocks"] > 0

    @pytest.mark.parametrize(
        ("argv", "says"),
        [
            (("",), "the name is empty"),
            (("llama-3-8b", "--max-num-seqs", "99999999999"), "max_num_seqs is 99999999999"),
            (("no-such-shape",), "none of the shapes llama-3-8b"),
            (("llama-3-8b", "--memory-fraction", "0"), "memory fraction: 0.0"),
            (("llama-3-8b", "--max-num-seqs", "0"), "max_num_seqs is 0"),
            (("llama-3-8b", "--max-model-len", "0"), "max_model_len is 0; this model allows 2 to 8192"),
            (("llama-3-8b", "--max-model-len", "99999999"), "max_model_len is 99999999"),
        ],
    )
    def test_what_cannot_work(
        self, argv: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str], profile: Path
    ) -> None:
        assert call("plan", "memory", *argv, "--profile", str(profile)) == 2
        assert says in capsys.readouterr().err
