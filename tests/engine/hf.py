"""A tiny random checkpoint that transformers writes and reads, and its greedy continuation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def write_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    stored: torch.dtype = torch.float32,
    shard_size: str = "1GB",
    **changes: Any,
) -> Path:
    """A model of 2 layers over bytes; `changes` override its config. `family` is transformers' "model_type"."""
    import transformers

    config = transformers.AutoConfig.for_model(
        family,
        **{
            "vocab_size": 260,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "bos_token_id": None,
            "eos_token_id": 259,
            **changes,
        },
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=0.15)
    model.to(stored).save_pretrained(folder, max_shard_size=shard_size)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@torch.inference_mode()
def greedy(folder: Path, prompt: list[int], tokens: int, **options: Any) -> list[int]:
    """What transformers continues with, one sequence at a time. options: of its `generate`."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=0,
        eos_token_id=None,
        **options,
    )
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def gaps(folder: Path, prompt: list[int], answer: list[int]) -> list[float]:
    """By how much transformers prefers its own choice to each token of `answer`, in logits."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return (logits.amax(dim=-1) - logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)).tolist()
