"""LLM: tokens equal transformers', text streams and stops, requests can be cancelled, bad ones are refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from engine.hf import greedy, write_checkpoint

from stepgraph.engine import LLM, SamplingParams
from stepgraph.engine.errors import RequestError
from stepgraph.runtime import Backend, CaptureError, ConfigError, DecodePhase, GraphConfig, Ladder

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(checkpoint, device="cpu", max_num_seqs=4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("graphs", ["full", "disabled"])
def test_greedy_tokens_equal_transformers(tmp_path: Path, tied: bool, graphs: str) -> None:
    folder = write_checkpoint(tmp_path, tie_word_embeddings=tied)
    llm = LLM(folder, device="cpu", graphs=graphs, max_num_seqs=3)
    prompts = [[1, 2, 3], list(range(40)), [7]]
    got = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    assert got == [greedy(folder, prompt, 12) for prompt in prompts]


def test_the_models_end_token_ends_the_text(llm: LLM) -> None:
    free = llm.generate("Hello", GREEDY)[0].outputs[0].token_ids
    end = next(token for token in free[1:] if token != free[0])
    stopped = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(end,)))[0].outputs[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free[: free.index(end) + 1]  # the end token is a token, but no text
    assert stopped.text == llm.tokenizer.decode(stopped.token_ids[:-1])


def test_max_tokens_and_the_models_length_end_it(llm: LLM) -> None:
    assert llm.generate("Hi", GREEDY)[0].outputs[0].finish_reason == "length"
    long = SamplingParams(temperature=0, max_tokens=10_000, ignore_eos=True)
    output = llm.generate([list(range(100))], long)[0]
    assert len(output.outputs[0].token_ids) == 28 and output.outputs[0].finish_reason == "length"


def test_a_stop_string_is_not_part_of_the_text(llm: LLM) -> None:
    whole = llm.generate("Hello", GREEDY)[0].outputs[0].text
    at = max(1, len(whole) // 2)
    stop = whole[at : at + 2]
    pieces: list[str] = []
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop)
    output = llm.generate("Hello", params, stream=lambda delta: pieces.append(delta.text))[0].outputs[0]
    assert output.text == whole[: whole.index(stop)] and output.finish_reason == "stop"
    assert "".join(pieces) == output.text


def test_the_stream_adds_up_and_says_why_it_ended(llm: LLM) -> None:
    texts, reasons = ["", "", ""], [None, None, None]
    for delta in llm.stream(["a", "bc", "def"], GREEDY):
        texts[delta.index] += delta.text
        reasons[delta.index] = delta.finish_reason or reasons[delta.index]
    assert texts == [output.outputs[0].text for output in llm.generate(["a", "bc", "def"], GREEDY)]
    assert reasons == ["length"] * 3


def test_leaving_the_stream_cancels_and_frees(llm: LLM) -> None:
    for _ in llm.stream(["a", "b", "c", "d", "e", "f"], SamplingParams(max_tokens=100, ignore_eos=True)):
        break
    pool = llm.core.scheduler.pool
    assert not llm.core.scheduler.has_work and pool.num_free == pool.capacity


def test_abort_ends_one_request_and_no_other(llm: LLM) -> None:
    def stop_the_first(delta) -> None:
        if delta.index == 0:
            llm.abort(delta.request_id)

    first, second = llm.generate(["ab", "cd"], GREEDY, stream=stop_the_first)
    assert first.outputs[0].finish_reason == "abort" and len(first.outputs[0].token_ids) < 12
    assert second.outputs[0].token_ids == llm.generate("cd", GREEDY)[0].outputs[0].token_ids
    llm.abort(10**9)  # unknown: nothing to do


def test_chat_goes_through_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    one = llm.chat(conversation, GREEDY)
    assert one[0].prompt_token_ids == llm.tokenizer.encode("<user>hi<a>")
    assert [o.outputs[0].text for o in llm.chat([conversation, conversation], GREEDY)] == [one[0].outputs[0].text] * 2


def test_sampling_parameters_one_each(llm: LLM) -> None:
    outputs = llm.generate(["a", "b"], [GREEDY, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12, 2]
    with pytest.raises(RequestError, match="1 sampling parameters for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])


def test_a_call_from_inside_a_callback_loses_nothing(llm: LLM) -> None:
    expected = [output.outputs[0].text for output in llm.generate(["ab", "cd", "ef"], GREEDY)]
    texts, inner = ["", "", ""], []

    def call_again(delta) -> None:
        texts[delta.index] += delta.text
        if len(inner) < 3:
            inner.append(llm.generate("xy", GREEDY)[0].outputs[0].text)

    outputs = llm.generate(["ab", "cd", "ef"], GREEDY, stream=call_again)
    assert texts == expected == [output.outputs[0].text for output in outputs]
    assert inner == [llm.generate("xy", GREEDY)[0].outputs[0].text] * 3


def test_streams_may_take_turns(llm: LLM) -> None:
    first = llm.stream("ab", GREEDY)
    text = next(first).text
    llm.generate("xy", GREEDY)
    assert text + "".join(delta.text for delta in first) == llm.generate("ab", GREEDY)[0].outputs[0].text


def test_a_call_between_two_pieces_of_a_stream_loses_none_of_another_prompt(llm: LLM) -> None:
    """The call ends both prompts of the stream, which is at a piece of the second."""
    want = [llm.generate(prompt, GREEDY)[0].outputs[0].text for prompt in ("first", "second")]
    texts = ["", ""]
    for piece in llm.stream(["first", "second"], GREEDY):
        if piece.index == 1 and not texts[1]:
            llm.generate("third", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
        texts[piece.index] += piece.text
    assert texts == want


def test_a_stream_that_is_collected_amid_a_step_ends_behind_it(llm: LLM) -> None:
    """The collector may come at any line, also while rows are being counted."""
    expected = [output.outputs[0].token_ids for output in llm.generate(["ab", "cd"], GREEDY)]
    kept = [llm.stream(text, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)) for text in ("ef", "gh")]
    for stream in kept:
        next(stream)
    scheduler, plan = llm.core.scheduler, llm.core.scheduler.plan_prefill

    def collecting():
        before = list(scheduler.rows)
        while kept:
            kept.pop().close()
        assert scheduler.rows == before, "a row went while the step was planned"
        return plan()

    scheduler.plan_prefill = collecting  # type: ignore[method-assign]
    try:
        outputs = llm.generate(["ab", "cd"], GREEDY)
    finally:
        del scheduler.plan_prefill
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert not scheduler.has_work and scheduler.pool.num_free == scheduler.pool.capacity


def test_a_stream_ends_whose_last_token_came_in_an_interrupted_step(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    expected = llm.generate("ab", params)[0].outputs[0].text
    first = llm.stream("ab", params)
    texts = [next(first).text]
    step = llm.core.step_ahead

    def interrupted():
        produced = step()
        if any(request.ended for request, _ in produced):
            raise KeyboardInterrupt
        return produced

    llm.core.step_ahead = interrupted  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate("cd", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    finally:
        del llm.core.step_ahead
    texts += [delta.text for delta in first]
    assert "".join(texts) == expected and not llm.core.scheduler.has_work


def test_texts_that_nobody_hears_are_whole_at_whatever_token_they_end(llm: LLM) -> None:
    """They are caught up with in turns."""
    for count in (1, 2, 15, 16, 17, 33):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        heard = llm.generate(["ab", "cde"], params, stream=lambda delta: None)
        silent = llm.generate(["ab", "cde"], params)
        assert [output.outputs[0] for output in silent] == [output.outputs[0] for output in heard]


def test_a_stream_that_is_never_read_queues_nothing(llm: LLM) -> None:
    llm.stream("ab", GREEDY)
    assert not llm.core.scheduler.has_work


@pytest.mark.parametrize("prompt", [["a"], [1.7], [True]])
def test_what_is_no_token_is_refused(llm: LLM, prompt) -> None:
    with pytest.raises(RequestError, match="token ids are whole numbers"):
        llm.generate([prompt], GREEDY)
    with pytest.raises(RequestError, match="sampling parameters are SamplingParams"):
        llm.generate(["a"], [None])
    with pytest.raises(RequestError, match="not a text"):
        llm.chat("hi")


@pytest.mark.parametrize(
    "prompts", [None, 5, b"ab", [b"ab"], bytearray(b"ab"), memoryview(b"ab"), {"prompt": "ab"}, [{"prompt": "ab"}]]
)
def test_what_is_neither_text_nor_a_list_is_no_prompt(llm: LLM, prompts) -> None:
    with pytest.raises(RequestError, match="prompts are text, token ids, or a list of either"):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("params", [5, True, SamplingParams, "greedy", {"temperature": 0}])
def test_what_are_no_sampling_parameters_are_refused(llm: LLM, params) -> None:
    with pytest.raises(RequestError, match="sampling parameters are SamplingParams"):
        llm.generate("ab", params)


@pytest.mark.parametrize("messages", [None, 5, {"role": "user", "content": "hi"}, ["hi"], [5], [[5]]])
def test_what_is_no_chat_is_refused(llm: LLM, messages) -> None:
    with pytest.raises(RequestError, match="a chat is a list of messages"):
        llm.chat(messages)


def test_token_ids_may_be_numpys(llm: LLM) -> None:
    ids = [1, 2, 3]
    want = llm.generate(ids, GREEDY)[0].outputs
    for given in (np.array(ids), list(np.array(ids)), [list(np.array(ids))]):
        (output,) = llm.generate(given, GREEDY)
        assert output.prompt_token_ids == ids and output.outputs == want


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "prompt 1 is empty"),
        ([0] * 128, "has 128 tokens; the model allows 128"),
        ([5, 260], "token 260 is outside the vocabulary of 260"),
        ([-1], "token -1 is outside"),
    ],
)
def test_a_bad_prompt_is_refused_before_any_is_queued(llm: LLM, prompt, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        llm.generate(["fine", prompt], GREEDY)
    assert not llm.core.scheduler.has_work


def test_a_request_that_can_never_fit_the_cache_is_refused(checkpoint: Path) -> None:
    llm = LLM(checkpoint, device="cpu", max_num_seqs=2, kv_blocks=4)
    with pytest.raises(RequestError, match="may need 5 KV blocks and the cache has 3"):
        llm.generate([[1] * 60], SamplingParams(max_tokens=20))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_num_seqs": 0}, "at least one request"),
        ({"max_num_seqs": 5, "ladder": Ladder.explicit([1, 4])}, "no room for a batch of 5"),
        ({"graphs": "sometimes"}, "'sometimes' is not one of full, breakable, piecewise, disabled, NONE"),
        ({"max_model_len": 129}, "this model allows 2 to 128"),
        ({"attention": "magic"}, "unknown backend 'magic'"),
        ({"kv_blocks": 1}, "at least 2 are needed"),
        ({"kv_blocks": 0}, "at least 2 are needed"),
        ({"kv_blocks": 10**12}, "give it fewer blocks"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
        ({"graphs": GraphConfig(), "ladder": Ladder.explicit([4])}, "give only one of them"),
        ({"max_num_seqs": 10**8}, "at most 65536"),
    ],
)
def test_settings_that_cannot_work_say_what_to_change(checkpoint: Path, options, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM(checkpoint, **{"device": "cpu", "max_num_seqs": 2, **options})


def test_graphs_by_vllms_names_and_by_configuration(checkpoint: Path, llm: LLM) -> None:
    expected = [output.outputs[0].token_ids for output in llm.generate(["ab", "cde"], GREEDY)]
    own = GraphConfig(DecodePhase(Backend.BREAKABLE, Ladder.explicit([2, 4, 512])), debug="eager-through-graph")
    for graphs in ("FULL_AND_PIECEWISE", "breakable", own):
        other = LLM(checkpoint, device="cpu", max_num_seqs=4, graphs=graphs, strict=True)
        assert [output.outputs[0].token_ids for output in other.generate(["ab", "cde"], GREEDY)] == expected
        assert other.stats.steps == sum(other.stats.by_mode().values())
    assert other.resolution.config.decode.ladder == Ladder.explicit([2, 4])
    assert [change.where for change in other.resolution.changes] == ["decode.ladder"]


def test_rungs_above_the_batch_are_left_out(checkpoint: Path) -> None:
    llm = LLM(checkpoint, device="cpu", max_num_seqs=13)
    assert sorted(key.num_reqs for key in llm.capture_report.graphs if key.is_uniform) == [1, 2, 4, 8, 16]


def test_out_of_memory_at_every_size_names_size_and_remedy(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("stepgraph.runtime.platforms.tape.TapePlatform.record", no_memory)
    with pytest.raises(CaptureError, match=r"out of memory while capturing 1 request; .* KV cache less memory"):
        LLM(checkpoint, device="cpu", max_num_seqs=4)


def test_a_cache_that_shrinks_before_the_first_piece_is_told(tmp_path, monkeypatch) -> None:
    llm = LLM(write_checkpoint(tmp_path), device="cpu", max_num_seqs=2)
    pieces = llm.stream([[1] * 100], SamplingParams(max_tokens=20))
    llm.core.scheduler.pool.shrink(4)
    with pytest.raises(RequestError, match="prompt 0 may need 8 KV blocks and the cache has 3"):
        next(pieces)
    assert not llm.core.scheduler.has_work
    assert llm.generate([[1] * 10], SamplingParams(max_tokens=4))
