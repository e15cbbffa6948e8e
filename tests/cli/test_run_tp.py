"""`stepgraph run` on several ranks: started by --tp, and by torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.hf import write_checkpoint

from stepgraph.cli import ranks as ranks_module
from stepgraph.cli.app import main
from stepgraph.cli.ranks import launch

SOURCE = Path(__file__).resolve().parents[2] / "src"
PATHS = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
PROMPTS = ("first", "a second, longer prompt")
TWO_GPUS = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("model"), hidden_size=64, num_key_value_heads=2, num_attention_heads=4,
        max_position_embeddings=60_000, eos_token_id=None,
    )  # fmt: skip


def run(
    *arguments: str, launcher: tuple[str, ...] = ("-m", "stepgraph"), **more: Any
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False, **more)


def report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def options(model: Path, *more: str, device: str = "cpu") -> list[str]:
    where = ("--model", str(model), "--device", device, "--dtype", "float32", "--kv-bytes", "50000000")
    return ["run", *PROMPTS, *where, "--json", "--max-tokens", "8", "--ladder", "1,2", *more]


@pytest.mark.parametrize("device", ["cpu", TWO_GPUS])
def test_ranks_that_are_started_here_print_once(model: Path, device: str) -> None:
    alone, two = (report(run(*options(model, *more, device=device))) for more in ((), ("--tp", "2")))
    assert [one["token_ids"] for one in two["results"]] == [one["token_ids"] for one in alone["results"]]
    assert alone["parallel"] is None
    assert two["parallel"]["ranks"] == 2
    kinds = [[one["kind"] for one in frozen] for frozen in two["parallel"]["collectives"].values()]
    assert kinds and all(found == ["all_reduce"] * 4 + ["gather"] for found in kinds)


def test_torchrun_starts_them_too(model: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "stepgraph")
    chosen = options(model, "--temperature", "0.8", "--seed", "3", "--top-k", "7")
    assert report(run(*chosen, launcher=launcher))["results"] == report(run(*chosen))["results"]


def test_a_top_k_above_the_vocabulary_is_none(model: Path) -> None:
    chosen = options(model, "--temperature", "0.8", "--seed", "3", "--top-k", str(10**12))
    assert report(run(*chosen, "--tp", "2"))["results"] == report(run(*chosen))["results"]


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert "Traceback" not in done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--tp", "0"), "at least one rank"),
        (("--tp", "3"), "3 ranks for 4 heads and 2 KV heads"),
        (("--tp", "100"), "100 ranks for 4 heads and 2 KV heads"),
        (("--tp", "2", "--model", "/no/such/model"), "/no/such/model does not exist"),
        (("--tp", "2", "--tables", str(SOURCE)), "has none for 2 ranks"),
        (("--tp", "2", "--lazy"), "ranks would record them at different times"),
        (("--tp", "2", "--compile", "aot_eager"), "does not see the collectives"),
        (("--tp", "2", "--adapter", str(SOURCE)), "of several ranks each has a part of the model"),
        (("--tp", "2", "--steps-per-launch", "auto"), "with several ranks it is 1"),
        (("--tp", "2", "--steps-per-launch", "many"), "a whole number from 1"),
    ],
)
def test_what_can_be_known_is_told_before_a_rank_is_started(
    model: Path,
    more: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ranks_module, "launch", lambda world: pytest.fail("ranks were started"))
    with pytest.raises(SystemExit) as ended:
        main(options(model, *more))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_more_ranks_than_gpus_are_refused_before_one_is_started(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks_module, "launch", lambda world: pytest.fail("ranks were started"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit) as ended:
        main(options(model, "--tp", "2", device="cuda"))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "2 ranks want a GPU each of this node, which has 1; start fewer, or all on the CPU with --device cpu" in said


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--attention", "none_such"), "none_such"),
        (("--kv-bytes", "10"), "kv_bytes is 10"),
    ],
)
def test_what_all_ranks_refuse_is_told_once(model: Path, more: tuple[str, ...], message: str) -> None:
    done = run(*options(model, "--tp", "2", *more))
    (said,) = errors(done)
    assert done.returncode == 2 and message in said


def test_what_another_rank_says_is_passed_on_and_its_error_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Three ranks: the first is killed, so that it says nothing itself."""
    program = (
        "import os, sys; rank = os.environ['RANK'];"
        "rank == '0' and os.kill(os.getpid(), 9);"
        "sys.stderr.write('a warning of rank ' + rank + '\\nerror: all the same\\n'); sys.exit(2)"
    )
    assert launch(3, [sys.executable, "-c", program]) == 1
    said = capfd.readouterr().err.splitlines()
    assert said.count("error: all the same") == 1
    assert {"a warning of rank 1", "a warning of rank 2"} <= set(said)


def test_a_killed_rank_decides_the_exit_code_though_another_is_gone_first(capfd: pytest.CaptureFixture[str]) -> None:
    program = (
        "import os, sys, time; rank = os.environ['RANK'];"
        "rank == '1' and (time.sleep(1), os.kill(os.getpid(), 9));"
        "sys.stderr.write('error: rank 1 died\\n'); sys.exit(2)"
    )
    assert launch(2, [sys.executable, "-c", program]) == 1
    assert capfd.readouterr().err.splitlines() == ["error: rank 1 died", "error: rank 1 was ended by signal 9"]


def test_an_interrupted_rank_decides_the_exit_code_though_another_is_gone_first() -> None:
    program = "import os, sys, time; late = os.environ['RANK'] == '1'; time.sleep(late); sys.exit(130 if late else 2)"
    assert launch(2, [sys.executable, "-c", program]) == 130


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
@pytest.mark.parametrize("device", ["cpu", TWO_GPUS])
def test_a_rank_killed_while_decoding_ends_the_command(model: Path, device: str) -> None:
    where = ("--model", str(model), "--device", device, "--dtype", "float32", "--kv-bytes", "50000000")
    command = [sys.executable, "-m", "stepgraph", "run", PROMPTS[0], *where, "--max-tokens", "50000", "--tp", "2"]
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.read(256)  # it decodes
        first, second = map(int, Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split())
        os.kill(second, signal.SIGKILL)
        started = time.monotonic()
        _, said = launcher.communicate(timeout=60)
        assert time.monotonic() - started < 15
        assert launcher.returncode == 1 and b"rank 1 died" in said, said
        assert not _runs(first)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells of a parent's death")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_its_launcher(how: signal.Signals) -> None:
    rank = "from stepgraph.cli.ranks import *; end_with_parent(); print(os.getpid(), flush=True); time.sleep(60)"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    environment = {**os.environ, "PYTHONPATH": PATHS}
    with subprocess.Popen(
        [sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(how)
        parent.wait()
        _wait_for_end(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells of a parent's death")
@pytest.mark.parametrize("told", [True, False])
def test_a_rank_ends_whose_launcher_was_killed_while_it_started(told: bool) -> None:
    """told: who launches it, which torchrun does not tell its ranks."""
    rank = f"""
import os, time
{told} or os.environ.pop("STEPGRAPH_LAUNCHER")
from stepgraph.cli.ranks import end_with_parent
launcher = os.getppid()
print(os.getpid(), flush=True)
while os.getppid() == launcher:
    time.sleep(0.01)
end_with_parent()
time.sleep(60)
"""
    launcher = f"import sys; from stepgraph.cli.ranks import launch; launch(1, [sys.executable, '-c', {rank!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": PATHS}
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        try:
            _wait_for_end(pid)
        finally:
            if _runs(pid):
                os.kill(pid, signal.SIGKILL)


def _wait_for_end(pid: int) -> None:
    until = time.monotonic() + 5
    while _runs(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
