"""The Triton kernels of sharded sampling under the interpreter. Run by test_sampling_shard.py, not collected."""

from functools import partial

import torch
from ops.shard_cases import batch, penalties, tokens_of

from stepgraph.ops.sampling import triton_shard
from stepgraph.ops.sampling.penalties import Penalties
from stepgraph.ops.sampling.shard import offer_reference, offer_width
from stepgraph.ops.sampling.triton_shard import choose_triton, offer_triton

CUTS = [0, 2500, 5001]
ours = partial(tokens_of, offer=offer_triton, choose=choose_triton)


def the_best_of_each_part() -> None:
    for asked in (None, penalties(12, 5001)):
        given = batch(12, 5001, filters=False)
        counted = None if asked is None else asked._replace(seen=asked.seen.clone())
        assert torch.equal(ours(CUTS, given, 0, counted), tokens_of(CUTS, given, 0, asked))
        assert asked is None or torch.equal(counted.seen, asked.seen), "both take note of the tokens"
    given = batch(12, 5001)
    for start, stop in zip(CUTS[:-1], CUTS[1:], strict=True):
        offers = [torch.zeros(12, 2, dtype=torch.int32) for _ in range(2)]
        for offer, out in zip((offer_triton, offer_reference), offers, strict=True):
            kept = {name: value for name, value in given.items() if name != "logits"}
            offer(given["logits"][:, start:stop].contiguous(), **kept, out=out, first=start, vocab=5001)
        assert torch.equal(offers[0][:, 1], offers[1][:, 1])
        close(*[out[:, :1] for out in offers])


def candidates() -> None:
    """Blocks of 64, so that a part has several, and one that is not full."""
    triton_shard._BLOCK = 64
    for count in (5, 16):  # the first is no power of two
        cuts, asked = [0, 130, 301], penalties(12, 301)
        given = batch(12, 301, seed=count)
        given["logits"][4, 100:200] = given["logits"][4, 7]  # equals in both parts
        given["logits"][5, 140:] = float("-inf")
        kept = {name: value for name, value in given.items() if name != "logits"}
        filters = torch.arange(12) % 6 >= 2
        offers = [torch.zeros(12, offer_width(count), dtype=torch.int32) for _ in range(2)]
        for offer, out in zip((offer_triton, offer_reference), offers, strict=True):
            mine = asked._replace(seen=asked.seen[:, 130:])
            offer(given["logits"][:, 130:].contiguous(), **kept, out=out, first=130, vocab=301, penalties=mine)
        there = [out[filters] for out in offers]
        finite = there[1][:, 4 : 4 + count].contiguous().view(torch.float32) > float("-inf")
        assert torch.equal(there[0][:, 4 + count :][finite], there[1][:, 4 + count :][finite])
        close(*[out[:, 2 : 4 + count] for out in there])
        assert offers[0][~filters][:, 4 : 4 + count].contiguous().view(torch.float32).eq(float("-inf")).all()
        counted = asked._replace(seen=asked.seen.clone())
        assert torch.equal(ours(cuts, given, count, counted), tokens_of(cuts, given, count, asked))
        assert torch.equal(counted.seen, asked.seen)
        few = [0, 3, 301]  # a part of fewer tokens than it may offer
        assert torch.equal(ours(few, given, count), tokens_of(few, given, count))
        triton_shard._MOST_LANES = 8  # then torch does what is too much for a program
        assert torch.equal(ours(cuts, given, count), tokens_of(cuts, given, count))
        triton_shard._MOST_LANES = 8192


def few_and_many_candidates() -> None:
    """One, and more than a block has tokens."""
    triton_shard._BLOCK = 64
    for count in (1, 100):
        given, cuts = batch(12, 301, seed=count), [0, 40, 301]
        assert torch.equal(ours(cuts, given, count), tokens_of(cuts, given, count))


def the_choice_among_parts() -> None:
    values = torch.tensor([[1.0, 3.0, float("-inf")], [2.0, 3.0, float("-inf")]])
    offers = torch.stack((values.view(torch.int32), torch.tensor([[5, 6, 7], [900, 901, 902]], dtype=torch.int32)), -1)
    row = {name: value for name, value in batch(3, 1000, filters=False).items() if name not in ("logits", "min_p")}
    out = torch.zeros(3, dtype=torch.int64)
    choose_triton(offers.contiguous(), **row, out=out, vocab=1000)
    assert out.tolist() == [900, 6, 7], out
    out.zero_()
    column, seen = torch.tensor([0.0, 0.5, 0.0]), torch.arange(3 * 1000, dtype=torch.int32).view(3, 1000)
    counted = Penalties(torch.ones(3), column, torch.zeros(3), seen.clone())
    choose_triton(offers.contiguous(), **row, out=out, vocab=1000, penalties=counted)
    seen[1, 6] += 2
    assert out.tolist() == [900, 6, 7] and torch.equal(counted.seen, seen), "the one row that asks for a penalty"


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Floats as their bits."""
    torch.testing.assert_close(
        ours.contiguous().view(torch.float32), theirs.contiguous().view(torch.float32), rtol=1e-5, atol=1e-5
    )


if __name__ == "__main__":
    the_best_of_each_part()
    the_choice_among_parts()
    candidates()
    few_and_many_candidates()
