"""Ranks with a part of the vocabulary each choose the tokens that one with the whole of it chooses."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from ops.interpreter import check_interpreted
from ops.shard_cases import batch, penalties, tokens_of

from stepgraph.ops.sampling.penalties import Penalties
from stepgraph.ops.sampling.reference import sample_reference
from stepgraph.ops.sampling.shard import offer_width

CUTS = {2: [0, 51, 101], 3: [0, 7, 50, 101], 4: [0, 32, 64, 96, 101], 1: [0, 101]}


def whole(given: dict[str, torch.Tensor], **more: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(given["seed"]), dtype=torch.int64)
    sample_reference(out=out, **given, **more)
    return out


@pytest.mark.parametrize("parts", CUTS)
@pytest.mark.parametrize("seed", range(4))
def test_parts_choose_what_the_whole_chooses(parts: int, seed: int) -> None:
    given = batch(48, 101, seed=seed)
    assert torch.equal(tokens_of(CUTS[parts], given, count=101), whole(given))


@pytest.mark.parametrize("parts", CUTS)
def test_rows_without_filters_need_one_candidate(parts: int) -> None:
    given = batch(48, 101, filters=False)
    assert torch.equal(tokens_of(CUTS[parts], given, count=0), whole(given))


def test_few_candidates_are_enough_where_what_is_kept_lies_among_them() -> None:
    given = batch(48, 101)
    given["top_p"] = torch.where(given["top_k"] > 0, given["top_p"], 1.0)  # nuclei of the five largest only
    given["min_p"].fill_(0.0)
    assert torch.equal(tokens_of(CUTS[3], given, count=5), whole(given))


def test_a_wider_nucleus_ends_with_the_candidates() -> None:
    given = batch(64, 101)
    given |= {"temperature": torch.full((64,), 5.0), "top_k": torch.zeros(64, dtype=torch.int32)}
    given |= {"top_p": torch.full((64,), 0.999), "min_p": torch.zeros(64)}
    tokens = tokens_of(CUTS[2], given, count=4)
    place = (given["logits"] > given["logits"].gather(1, tokens[:, None])).sum(1)
    assert place.max() < 8  # among what two parts have offered
    assert len(set(tokens.tolist())) > 10  # and drawn


def test_penalties_are_of_a_part_too() -> None:
    given, asked = batch(48, 101), penalties(48, 101)
    columns = {"repetition_penalty": asked.repetition, "presence_penalty": asked.presence}
    columns |= {"frequency_penalty": asked.frequency, "seen": asked.seen.clone()}
    assert torch.equal(tokens_of(CUTS[3], given, 101, asked), whole(given, **columns))


def test_nan_and_infinite_logits() -> None:
    given = batch(12, 101)
    given["logits"][0] = float("nan")
    given["logits"][1, 60] = float("inf")
    given["logits"][2, :] = float("-inf")
    given["logits"][2, 99] = -3.0
    tokens = tokens_of(CUTS[2], given, count=8)
    assert tokens[1] == 60 and tokens[2] == 99
    assert bool(((tokens >= 0) & (tokens < 101)).all())


def test_equal_logits_give_the_lowest_token() -> None:
    given = batch(4, 101)
    given["temperature"].zero_()
    given["logits"].zero_()
    assert tokens_of(CUTS[4], given, count=0).tolist() == [0] * 4


def test_the_triton_kernels_agree_under_the_interpreter() -> None:
    check_interpreted("interpreted_shard.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run where there is a GPU")
def test_the_triton_kernels_compile_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that changes its type passes the interpreter, and no compiler."""
    pytest.importorskip("triton")
    from ops.compiling import compiled_kernels

    from stepgraph.ops.sampling import triton_shard

    monkeypatch.setattr(triton_shard, "can_overlap", lambda device: True)
    given = batch(4, 101)
    logits, min_p, out = given.pop("logits"), given.pop("min_p"), torch.zeros(4, dtype=torch.int64)
    for count in (0, 1, 8):
        offers = torch.zeros(2, 4, offer_width(count), dtype=torch.int32)

        def step(asked: Penalties | None, offers: torch.Tensor = offers) -> None:
            triton_shard.offer_triton(logits, **given, out=offers[0], first=0, vocab=101, min_p=min_p, penalties=asked)
            triton_shard.choose_triton(offers, **given, out=out, vocab=101, min_p=min_p, penalties=asked)

        for asked in (None, penalties(4, 101)):
            listing = ["_list"] if count else []
            assert compiled_kernels(partial(step, asked)) == ["_best", *listing, "_join", "_choose"]


@pytest.mark.gpu
@pytest.mark.parametrize(("parts", "count"), [(2, 64), (8, 64), (2, 100), (2, 0)])
def test_the_kernels_choose_what_torch_chooses(parts: int, count: int) -> None:
    from stepgraph.ops.sampling.triton_shard import choose_triton, offer_triton

    vocab = 128256
    cuts = [vocab * part // parts for part in range(parts + 1)]
    given = {name: value.cuda() for name, value in batch(192, vocab, filters=count > 0).items()}
    asked = Penalties(*(value.cuda() for value in penalties(192, vocab)))
    want = tokens_of(cuts, given, count, asked._replace(seen=asked.seen.clone()))
    mine = asked._replace(seen=asked.seen.clone())
    got = tokens_of(cuts, given, count, mine, offer=offer_triton, choose=choose_triton)
    apart = (got != want).nonzero()[:, 0].tolist()
    assert len(apart) <= 3, apart  # a last digit of exp or log decides which
    noted = (mine.seen - asked.seen).nonzero()
    penalised = (torch.arange(192) % 3 == 0).nonzero()[:, 0].cuda()
    assert torch.equal(noted, torch.stack((penalised, got[penalised]), 1))
