"""Several ranks give the tokens of one, with graphs and without; ranks that differ end together."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comm.ranks_in_processes import Ended, results, run_ranks
from engine.hf import write_checkpoint

from stepgraph.comm.all_reduce import AllReduce
from stepgraph.comm.errors import CommError
from stepgraph.comm.group import Group
from stepgraph.engine import LLM, SamplingParams
from stepgraph.engine.errors import RequestError
from stepgraph.engine.parallel import TensorParallel, require_plain
from stepgraph.runtime import Ladder
from stepgraph.runtime.errors import ConfigError

PROMPTS = [[5, 9, 200, 31], [77], list(range(1, 40)), [3, 3, 3, 8, 120]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MIXED = [
    GREEDY,
    SamplingParams(temperature=0.8, seed=11, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.8, seed=12, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, repetition_penalty=1.4, frequency_penalty=0.3, seed=13, max_tokens=12),
]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64},
    "llama, tied, uneven": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
    "qwen2, shared KV heads": {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64},
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64, "head_dim": 16},
}


def checkpoint(folder: Path, family: str) -> Path:
    tied = "tied" in family
    return write_checkpoint(folder, family.split(",")[0], tie_word_embeddings=tied, **FAMILIES[family])


def make_llm(folder: Path, graphs: str, **options: Any) -> LLM:
    chosen = {
        "max_num_seqs": 4,
        "chunk_tokens": 16,
        "ladder": None if graphs == "disabled" else Ladder.explicit([2, 4]),
    }
    return LLM(folder, device="cpu", graphs=graphs, kv_blocks=64, **(chosen | options))


def tokens(llm: LLM, params: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


def parallel(group: Group) -> TensorParallel:
    return TensorParallel(group, AllReduce(group, why_library="a CPU group"), candidates=64)


def generated(group: Group, folder: Path, graphs: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in graphs:
        mine = parallel(group)
        llm = make_llm(folder, mode, parallel=mine)
        # What another rank asks for does not matter: requests are rank 0's.
        params = MIXED if group.rank == 0 else GREEDY
        both, told = (tokens(llm, GREEDY), tokens(llm, params)), llm.core._flights.told.tolist()
        found[mode] = *both, llm.stats.as_dict()["modes"], mine.frozen(), told
    return found


@pytest.mark.parametrize(
    ("family", "world", "graphs"),
    [
        ("llama", 2, ["full", "breakable", "disabled"]),
        ("llama, tied, uneven", 2, ["full"]),
        ("qwen2, shared KV heads", 4, ["full"]),
        ("qwen3", 8, ["full"]),
    ],
)
def test_tokens_equal_those_of_one_rank(tmp_path: Path, family: str, world: int, graphs: list[str]) -> None:
    folder = checkpoint(tmp_path / "model", family)
    (tmp_path / "ranks").mkdir()
    alone = make_llm(folder, "full")
    expected = tokens(alone, GREEDY), tokens(alone, MIXED)
    of_ranks = results(run_ranks(world, tmp_path / "ranks", generated, folder, graphs))
    for found in of_ranks:
        for mode in graphs:
            greedy, mixed, modes, frozen, told = found[mode]
            assert (greedy, mixed) == expected, mode
            assert told == of_ranks[0][mode][-1], "each rank's device tells its host the same"
            if mode == "disabled":
                assert set(modes) == {"EAGER"} and not frozen
            else:
                assert "EAGER" not in modes
                for collectives in frozen.values():  # two a layer, and the gather of candidates
                    assert [one["kind"] for one in collectives] == ["all_reduce"] * 4 + ["gather"]


def closes(group: Group, folder: Path) -> tuple[Any, ...]:
    llm = make_llm(folder, "full", parallel=parallel(group))
    runner, group_there = llm.core.runner, []
    before, release = len(runner.capture_report.graphs), runner.release

    def noting() -> None:
        group_there.append(dist.is_initialized())
        release()

    runner.release = noting  # type: ignore[method-assign]
    group.close()
    return before, group_there, len(runner.capture_report.graphs), dist.is_initialized()


def fails_in_capture(group: Group, folder: Path) -> None:
    mine = parallel(group)
    sampler = mine.sampler

    def broken_sampler(config: Any) -> Any:
        sample, calls = sampler(config), []

        def broken(*tensors: torch.Tensor, **options: Any) -> None:
            calls.append(len(tensors[0]))
            if len(calls) == 3:
                raise torch.OutOfMemoryError("a planted shortage")
            sample(*tensors, **options)

        return broken

    if group.rank == 1:
        mine.sampler = broken_sampler  # type: ignore[method-assign,assignment]
    make_llm(folder, "full", parallel=mine)


def follows(group: Group, folder: Path) -> list[str]:
    """What a rank does at each step, of steady decode and of changes, in its order."""
    mine = parallel(group)
    llm = make_llm(folder, "full", parallel=mine, max_num_seqs=2)
    core, done = llm.core, list[str]()
    flights, agree, check = core._flights, mine.agree_on_step, mine.check

    def noting(what: str, function: Any) -> Any:
        def noted(*arguments: Any) -> Any:
            done.append(what)
            return function(*arguments)

        return noted

    mine.agree_on_step = noting("agree", agree)  # type: ignore[method-assign]
    flights.launched_again = noting("launch", flights.launched_again)  # type: ignore[method-assign]
    flights._check = noting("check", check)
    flights._take = noting("take", flights._take)  # type: ignore[method-assign]
    ends = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (9, 3, 5, 1)]
    llm.generate(PROMPTS, ends)
    return done


def raises_before_tokens(group: Group, folder: Path) -> tuple[list[int], int]:
    """The fourth step goes wrong; the step behind it is launched by then."""
    mine, seen = parallel(group), []
    llm = make_llm(folder, "full", parallel=mine)
    core, check, calls = llm.core, mine.check, []

    def late() -> None:
        calls.append(len(core._flights.under_way))
        check()
        if len(calls) == 4:
            raise CommError("a planted lateness")

    core._flights._check = late
    with pytest.raises(CommError, match="a planted lateness"):
        for delta in llm.stream([[1, 2, 3]], GREEDY):
            seen.append(delta.request_id)
    return calls, len(seen)


def has_another_ladder(group: Group, folder: Path) -> None:
    sizes = [1, 2, 4] if group.rank == 1 else [2, 4]
    make_llm(folder, "full", parallel=parallel(group), ladder=Ladder.explicit(sizes))


def has_another_batch(group: Group, folder: Path) -> None:
    mine = parallel(group)
    llm = make_llm(folder, "full", parallel=mine)
    if group.rank == 1:
        share = mine.share_call
        mine.share_call = lambda make: (share(make), make())[1]  # type: ignore[method-assign]
    llm.generate(PROMPTS[: 2 + group.rank], GREEDY)


def is_killed(group: Group, folder: Path) -> None:
    llm = make_llm(folder, "full", parallel=parallel(group))
    many = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    for number, _ in enumerate(llm.stream([[1, 2, 3]], many)):
        if number == 20 and group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"), "llama")


def ended(tmp_path: Path, function: Any, small: Path) -> list[Ended]:
    started = time.monotonic()
    all_of_them = run_ranks(2, tmp_path, function, small)
    assert time.monotonic() - started < 90
    return all_of_them


def test_the_graphs_of_an_engine_go_before_its_group(tmp_path: Path, small: Path) -> None:
    for before, group_there, after, group_after in results(run_ranks(2, tmp_path, closes, small)):
        assert before > 0 and group_there == [True]
        assert after == 0 and not group_after


def test_a_rank_that_raises_in_its_capture_is_known_to_all(tmp_path: Path, small: Path) -> None:
    first, second = ended(tmp_path, fails_in_capture, small)
    assert second.error is not None and "rank 1, step of" in second.error and "a planted shortage" in second.error
    assert first.error is not None and "rank 1 failed: rank 1, step of" in first.error


def test_ranks_agree_before_a_launch_and_check_before_tokens(tmp_path: Path, small: Path) -> None:
    first, second = results(run_ranks(2, tmp_path, follows, small))
    assert first == second
    assert first[:4] == ["agree", "launch", "agree", "launch"], "the second step is launched ahead"
    launches = [at for at, what in enumerate(first) if what == "launch"]
    agreed = [at for at in launches if first[at - 1] == "agree"]
    assert first.count("agree") == len(agreed), "a changed batch is agreed on and then launched"
    assert 4 <= len(agreed) < len(launches), "of steady decode nothing is said"
    taken = [at for at, what in enumerate(first) if what == "take"]
    assert len(taken) == len(launches) and all(first[at - 1] == "check" for at in taken)


def test_tokens_of_a_step_that_went_wrong_are_not_given(tmp_path: Path, small: Path) -> None:
    for calls, seen in results(run_ranks(2, tmp_path, raises_before_tokens, small)):
        assert calls == [2, 2, 2, 2] and seen <= 3


def test_a_rank_with_another_ladder_is_known_to_all(tmp_path: Path, small: Path) -> None:
    for one in ended(tmp_path, has_another_ladder, small):
        assert one.error is not None and "ranks disagree on what to capture" in one.error


def test_ranks_with_another_batch_do_not_replay(tmp_path: Path, small: Path) -> None:
    errors = [str(one.error) for one in ended(tmp_path, has_another_batch, small)]
    assert any("ranks disagree on the batch of a step" in error for error in errors), errors
    assert all("CommError" in error for error in errors)


def test_a_rank_killed_while_decoding_ends_the_other(tmp_path: Path, small: Path) -> None:
    first, second = ended(tmp_path, is_killed, small)
    assert second.code == -signal.SIGKILL
    assert first.error is not None and "rank 1 died" in first.error


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"lazy": True}, "lazy graphs"),
        ({"compiled": True}, "does not see the collectives"),
        ({"adapters": True}, "adapters: they are whole"),
        ({"steps_per_launch": 2}, "steps_per_launch: with several ranks it is 1"),
    ],
)
def test_what_ranks_cannot_have(asked: dict[str, Any], message: str) -> None:
    plain = {"lazy": False, "compiled": False, "adapters": False, "steps_per_launch": 1}
    require_plain(**plain)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        require_plain(**plain | asked)  # type: ignore[arg-type]


def test_what_requests_of_ranks_cannot_have() -> None:
    mine = TensorParallel.__new__(TensorParallel)
    mine.candidates = 64
    with pytest.raises(RequestError, match="top_k is 65, and each rank offers 64"):
        mine.require(SamplingParams(temperature=1, top_k=65))
    mine.candidates = 0
    with pytest.raises(RequestError, match="ranks offer one token each"):
        mine.require(SamplingParams(temperature=1, top_p=0.5))
    mine.require(SamplingParams(temperature=1))
    mine.require(SamplingParams(temperature=0, top_k=5))


def leaves_early(group: Group, folder: Path) -> None:
    llm = make_llm(folder, "full", parallel=parallel(group))
    llm.generate(PROMPTS, GREEDY)
    if group.rank == 0:
        llm.generate(PROMPTS, GREEDY)


def breaks_off_a_stream(group: Group, folder: Path, then: str) -> None:
    llm = make_llm(folder, "full", parallel=parallel(group))
    many = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    for number, _ in enumerate(llm.stream([[1, 2, 3]], many)):
        if number == 5 and group.rank == 0:
            break
    if then == "generate":
        llm.generate(PROMPTS, GREEDY)


def refuses_a_call(group: Group, folder: Path) -> tuple[str, list[list[int]]]:
    """Rank 0 raises before it shares; what the other asks for does not matter, wrong or not."""
    llm = make_llm(folder, "full", parallel=parallel(group))
    wrong, fine = [GREEDY] * 3, GREEDY
    with pytest.raises(RequestError) as refused:
        llm.generate(PROMPTS, fine if group.rank else wrong)
    return str(refused.value), tokens(llm, wrong if group.rank else fine)


def is_another_engine(group: Group, folders: list[Path], options: list[dict[str, Any]], candidates: list[int]) -> None:
    mine = TensorParallel(group, AllReduce(group, why_library="a CPU group"), candidates=candidates[group.rank])
    make_llm(folders[group.rank], "full", parallel=mine, **options[group.rank])


def makes_one_after_another(group: Group, folder: Path) -> dict[str, Any]:
    mine = parallel(group)
    first = make_llm(folder, "full", parallel=mine)
    found: dict[str, Any] = {"first": tokens(first, GREEDY), "frozen": set(mine.frozen())}
    with pytest.raises(CommError, match="another engine has it; release that one first"):
        make_llm(folder, "full", parallel=mine)
    with pytest.raises(CommError, match="another engine has it"):
        make_llm(folder, "full", parallel=TensorParallel(group, mine.all_reduce, candidates=64))
    found["still"] = tokens(first, GREEDY)
    first.core.release()
    second = make_llm(folder, "full", parallel=mine, ladder=Ladder.explicit([4]))
    first.core.release()  # once more, which is nothing to the second
    found |= {"second": tokens(second, GREEDY), "frozen of the second": set(mine.frozen())}
    beside = make_llm(folder, "full", parallel=parallel(group))
    return found | {"beside": tokens(beside, GREEDY), "second, still": tokens(second, GREEDY)}


def is_used_when_closed(group: Group, folder: Path) -> list[str]:
    mine = parallel(group)
    llm = make_llm(folder, "full", parallel=mine)
    group.close()
    said = []
    uses = [
        lambda: llm.generate(PROMPTS, GREEDY),
        lambda: mine.all_reduce(torch.ones(4)),
        lambda: mine.gather(torch.ones(4)),
        lambda: group.all_reduce_(torch.ones(4)),
        lambda: group.share(1),
        lambda: mine.check(),
    ]
    for use in uses:
        with pytest.raises(CommError) as error:
            use()
        said.append(str(error.value))
    return said


def both_errors(tmp_path: Path, function: Any, *arguments: Any) -> list[str]:
    started = time.monotonic()
    errors = [str(one.error) for one in run_ranks(2, tmp_path, function, *arguments, limit=40)]
    assert time.monotonic() - started < 30
    return errors


def test_a_rank_that_leaves_early_is_not_waited_for(tmp_path: Path, small: Path) -> None:
    for error in both_errors(tmp_path, leaves_early, small):
        assert error.startswith("CommError") and "rank 0 is taking the prompts of a call" in error, error
        assert "rank 1 is letting go of graphs" in error


@pytest.mark.parametrize(("then", "doing"), [("generate", "taking the prompts"), ("leave", "letting go of graphs")])
def test_a_stream_that_one_rank_breaks_off_ends_both(tmp_path: Path, small: Path, then: str, doing: str) -> None:
    """One waits for the other, which is in a sum: neither can be told but from beside."""
    for error in both_errors(tmp_path, breaks_off_a_stream, small, then):
        assert f"rank 0 is {doing}" in error and "rank 1 is in a step that rank 0 does not run" in error, error


def test_a_call_that_rank_0_refuses_is_refused_on_all(tmp_path: Path, small: Path) -> None:
    expected = tokens(make_llm(small, "full"), GREEDY)
    for refused, found in results(run_ranks(2, tmp_path, refuses_a_call, small, limit=40)):
        assert "3 sampling parameters for 4 prompts" in refused
        assert found == expected


@pytest.mark.parametrize(
    ("differs", "says"),
    [
        ("checkpoint", "model's hidden_size (rank 0: 64, rank 1: 128)"),
        ("weights", "digest of the embedding (rank 0: "),
        ("dtype", "dtype (rank 0: torch.float32, rank 1: torch.bfloat16)"),
        ("candidates", "candidates (rank 0: 64, rank 1: 0)"),
        ("chunk", "chunk_tokens (rank 0: 16, rank 1: 32)"),
    ],
)
def test_ranks_with_another_engine_are_told_on_all(tmp_path: Path, small: Path, differs: str, says: str) -> None:
    folders, options, candidates = [small, small], [{}, {}], [64, 64]
    if differs in ("checkpoint", "weights"):
        sizes = FAMILIES["llama"] | ({"hidden_size": 128} if differs == "checkpoint" else {})
        rounded = torch.bfloat16 if differs == "weights" else torch.float32
        folders[1] = write_checkpoint(tmp_path / "other", "llama", stored=rounded, **sizes)
    elif differs == "candidates":
        candidates[1] = 0
    else:
        options[1] = {"dtype": "bfloat16"} if differs == "dtype" else {"chunk_tokens": 32}
    (tmp_path / "ranks").mkdir()
    for error in both_errors(tmp_path / "ranks", is_another_engine, folders, options, candidates):
        assert error.startswith("CommError: ranks make different engines: ") and says in error, error


def test_an_all_reduce_has_one_engine_after_another(tmp_path: Path, small: Path) -> None:
    for found in results(run_ranks(2, tmp_path, makes_one_after_another, small, limit=40)):
        runs = [found[name] for name in ("first", "still", "second", "beside", "second, still")]
        assert all(run == runs[0] for run in runs)
        assert {"2 requests", "4 requests"} <= found["frozen"]
        assert "4 requests" in found["frozen of the second"] and "2 requests" not in found["frozen of the second"]


def test_nothing_runs_in_a_closed_group(tmp_path: Path, small: Path) -> None:
    for said in results(run_ranks(2, tmp_path, is_used_when_closed, small, limit=40)):
        assert all("the group is closed" in one for one in said), said
