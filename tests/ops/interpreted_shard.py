"""The Triton kernels of sharded sampling under the interpreter. Run by test_sampling_shard.py, not collected."""

import torch
from ops.shard_cases import batch, penalties, tokens_of

from stepgraph.ops.sampling.penalties import Penalties
from stepgraph.ops.sampling.shard import offer_reference
from stepgraph.ops.sampling.triton_shard import choose_best, offer_best

CUTS = [0, 2500, 5001]


def main() -> None:
    for asked in (None, penalties(12, 5001)):
        given = batch(12, 5001, filters=False)
        ours = tokens_of(CUTS, given, 0, asked, offer=offer_best)
        assert torch.equal(ours, tokens_of(CUTS, given, 0, asked, offer=offer_reference))
    given = batch(12, 5001)
    for start, stop in zip(CUTS[:-1], CUTS[1:], strict=True):
        offers = [torch.zeros(12, 2, dtype=torch.int32) for _ in range(2)]
        for offer, out in zip((offer_best, offer_reference), offers, strict=True):
            kept = {name: value for name, value in given.items() if name != "logits"}
            offer(given["logits"][:, start:stop].contiguous(), **kept, out=out, first=start, vocab=5001)
        assert torch.equal(offers[0][:, 1], offers[1][:, 1])
        values = [out[:, 0].contiguous().view(torch.float32) for out in offers]
        for ours, theirs in zip(*[value.tolist() for value in values], strict=True):
            assert abs(ours - theirs) <= 1e-5 * max(1.0, abs(theirs))
    values = torch.tensor([[1.0, 3.0, float("-inf")], [2.0, 3.0, float("-inf")]])
    offers = torch.stack((values.view(torch.int32), torch.tensor([[5, 6, 7], [900, 901, 902]], dtype=torch.int32)), -1)
    out = torch.zeros(3, dtype=torch.int64)
    choose_best(offers.contiguous(), out)
    assert out.tolist() == [900, 6, 7], out
    out.zero_()
    column, seen = torch.tensor([0.0, 0.5, 0.0]), torch.arange(3 * 1000, dtype=torch.int32).view(3, 1000)
    counted = Penalties(torch.ones(3), column, torch.zeros(3), seen.clone())
    choose_best(offers.contiguous(), out, counted)
    seen[1, 6] += 2
    assert out.tolist() == [900, 6, 7] and torch.equal(counted.seen, seen), "the one row that asks for a penalty"


if __name__ == "__main__":
    main()
