"""A transformers model decoded through stepgraph: its own modules, its own StaticCache, one launch a step.

Usage: transformers_static_cache.py [cpu|cuda] [model directory]; without a directory, a tiny random Llama.
"""

import copy
import inspect
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, StaticCache

from stepgraph import GraphConfig, GraphRunner, Ladder, PaddingPolicy, Slot, StaticBuffers

ROWS, LENGTH, NEW = 4, 64, 24  # requests, cache positions a request, tokens to generate


def load(directory: str | None, device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if directory is None:
        sizes = dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    else:  # in float32, where two orders of summing do not yet give two tokens
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0  # generate() ends at NEW too
    return model.to(device).eval()


def first_rows(cache: StaticCache, n: int) -> StaticCache:
    """A cache of n rows in the memory of a larger one. Its length is the same tensor, so it advances with it."""
    rows = copy.copy(cache)
    rows.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in rows.layers:
        layer.keys, layer.values = layer.keys[:n], layer.values[:n]
    return rows


@torch.no_grad()
def main(device: str, directory: str | None = None) -> None:
    model = load(directory, device)
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # by version
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    if any(cache.is_sliding):  # such layers count positions in Python, which a replay does not run
        sys.exit("this model has sliding-window layers; StaticCache cannot be captured for it")
    # It allocates at its first use, and the views below need its memory now.
    model(input_ids=torch.zeros(ROWS, 1, dtype=torch.int64, device=device), **{keyword: cache}, use_cache=True)
    caches = {n: first_rows(cache, n) for n in range(1, ROWS + 1)}

    def forward(ids: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": visible, "use_cache": True}
        return model(**inputs, **{keyword: caches[len(ids)]}).logits[:, -1].argmax(dim=-1)

    def step(token: torch.Tensor, position: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        token.copy_(forward(token[:, None], position[:, None], visible))  # the next step's input, on the device
        position.add_(1)
        return token

    slots = [
        Slot("token", torch.int64, per="request", pad=PaddingPolicy.ZERO, owner="device"),
        Slot("position", torch.int64, per="request", pad=PaddingPolicy.ZERO, owner="device"),
        # 2D, so that transformers builds the causal mask from the cache's length, a tensor that replays advance
        Slot("visible", torch.bool, "request", PaddingPolicy.FILL_SENTINEL, (LENGTH,), pad_value=1, owner="device"),
    ]
    buffers = StaticBuffers(max_requests=ROWS, slots=slots, device=device)
    runner = GraphRunner(step, buffers, GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.explicit([1, 2, ROWS])))
    runner.watch(model)  # from the capture on, a weight that is rebound or moved is an error and not a wrong token
    runner.capture()

    for lengths in ((7, 3, 12), (5,)):
        n, longest = len(lengths), max(lengths)
        visible = torch.ones(n, LENGTH, dtype=torch.bool, device=device)
        for row, length in enumerate(lengths):
            visible[row, : longest - length] = False  # a StaticCache has one length for all rows: pad on the left
        ids = torch.randint(model.config.vocab_size, (n, longest), device=device)
        mask = visible[:, :longest].long()
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        cache.reset()  # forgets the last batch, and what warming up wrote
        tokens = [forward(ids, positions, visible)]  # prefill, eagerly
        buffers.patch(range(n), token=tokens[0], position=positions[:, -1] + 1, visible=visible)
        for _ in range(NEW - 1):  # no inputs: one launch, and the device advances the rest
            out = runner(num_requests=n)
            tokens.append(out.output.clone())  # the next step overwrites the output
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)[:, longest:]
        assert torch.equal(torch.stack(tokens, dim=1), expected)
        print(f"{n} at once: {out.mode}, {out.padded - n} padded rows, {NEW} tokens each, as generate() has them")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["cuda" if torch.cuda.is_available() else "cpu"])
