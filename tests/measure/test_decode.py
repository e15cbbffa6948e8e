"""The measured decode step: the same work at every step, for any number of rows."""

import pytest
import torch
from engine.tiny import tiny_model

from stepgraph.measure.decode import DecodeRows, is_ours, load_model
from stepgraph.runtime import ConfigError, GraphConfig, Ladder

GRAPHS = GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.explicit([1, 4]))


@torch.inference_mode()
def test_rows_come_and_go_and_stay_where_they_are() -> None:
    decode = DecodeRows(tiny_model(), GRAPHS, rows=4, context=20)
    decode.core.capture()
    for rows in (1, 3, 4, 2):
        decode.stage(rows)
        for _ in range(3):
            decode.rewind()
            decode.step()
        assert decode.buffers["positions"].tolist() == [20] * rows + [0] * (4 - rows)
        assert decode.buffers["seq_lens"].tolist() == [21] * rows + [0] * (4 - rows)
    eager = decode.another(GraphConfig.preset("NONE"))
    decode.rewind()
    decode.step(eager)
    assert eager.stats.by_mode() == {"EAGER": 1} and decode.runner.stats.by_mode() == {"FULL": 16}


@torch.inference_mode()
def test_a_step_in_a_graph_chooses_what_an_eager_one_does() -> None:
    decode = DecodeRows(tiny_model(), GRAPHS, rows=4, context=20)
    decode.core.capture()
    eager = decode.another(GraphConfig.preset("NONE"))
    chosen = []
    for runner in (decode.runner, eager):
        decode.stage(3)
        decode.rewind()
        decode.buffers["tokens"][:3] = torch.tensor([5, 6, 7])
        decode.step(runner)
        chosen.append(decode.buffers["tokens"].tolist())
    assert chosen[0] == chosen[1]


def test_sizes_are_checked() -> None:
    with pytest.raises(ConfigError, match="both start at 1"):
        DecodeRows(tiny_model(), GRAPHS, rows=0, context=20)
    with pytest.raises(ConfigError, match="allows sequences of 8192 tokens, not of 9000; lower the tokens of context"):
        load_model("llama-3-8b", device="cpu", max_len=9000)


def test_whose_model_it_is(tmp_path) -> None:
    assert not is_ours(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}', encoding="utf-8")
    assert not is_ours(tmp_path)
