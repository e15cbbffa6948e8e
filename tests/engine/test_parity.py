"""The demo model against transformers on the same weights: 4 prompts x 16 tokens (20 x 64: benchmarks/parity.py)."""

from pathlib import Path

import pytest
import torch

from stepgraph.engine import LLM, SamplingParams

PROMPTS = ("What is the capital of France?", "Why is the sky blue?", "What is 7 times 8?", "Write a haiku about rain.")
TOKENS, TIE = 16, 1e-3


@pytest.fixture(scope="module")
def reference(demo_model: Path):
    """transformers' Llama with the demo's weights. That our reading of them is right is test_gguf's business."""
    import transformers

    from stepgraph.engine.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(demo_model, dtype=torch.float32, device="cpu")
    c = checkpoint.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        rms_norm_eps=c.rms_norm_eps,
        max_position_embeddings=c.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(dict(checkpoint.weights), strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


@torch.inference_mode()
def preferred(reference, prompt: list[int], answer: list[int]) -> list[float]:
    """By how much the reference prefers its own choice to ours at each token, in logits."""
    logits = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return (logits.amax(dim=-1) - logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)).tolist()


@pytest.mark.parametrize("graphs", ["full", "disabled"])
def test_greedy_tokens_equal_transformers(demo_model: Path, reference, graphs: str) -> None:
    llm = LLM(demo_model, device="cpu", graphs=graphs, max_num_seqs=4, max_model_len=256)
    prompts = [llm.chat_prompt([{"role": "user", "content": text}]) for text in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts[:2]]
    for prompt, answer in zip(prompts + prompts[:2], together + alone, strict=True):
        gaps = preferred(reference, prompt, answer)
        assert max(gaps) < TIE and sum(gap > 0 for gap in gaps) <= 1  # a tie may go either way, and is rare


def test_it_knows_the_capital_of_france(demo_model: Path) -> None:
    llm = LLM(demo_model, device="cpu", max_num_seqs=1, max_model_len=256)
    answer = llm.chat([{"role": "user", "content": PROMPTS[0]}], SamplingParams(temperature=0, max_tokens=16))
    assert answer[0].outputs[0].text == "The capital of France is Paris."
