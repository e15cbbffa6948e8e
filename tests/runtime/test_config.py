import pytest

from stepgraph.runtime import Backend, ConfigError, GraphConfig, Ladder


def test_presets_take_vllms_names() -> None:
    ladder = Ladder.vllm(8)
    assert GraphConfig.preset("FULL", ladder=ladder) == GraphConfig(Backend.FULL, ladder)
    assert GraphConfig.preset("NONE").backend is Backend.DISABLED


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown mode 'FULLISH'"):
        GraphConfig.preset("FULLISH")
    with pytest.raises(ConfigError, match="needs a ladder"):
        GraphConfig.preset("FULL")
    with pytest.raises(ConfigError, match="warm-ups"):
        GraphConfig(Backend.FULL, Ladder.vllm(8), warmups=0)
