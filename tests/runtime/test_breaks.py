"""The decorator by itself: what it calls, what it is called, and when there is a session."""

import functools

import pytest

from stepgraph.runtime.breaks import breaking, graph_break


class Session:
    def __init__(self) -> None:
        self.seen: list[tuple] = []

    def at_break(self, name, function, args, kwargs):
        self.seen.append((name, args, kwargs))
        with breaking(None):
            return function(*args, **kwargs)


@graph_break
def add(a: int, b: int = 1) -> int:
    """Adds."""
    return a + b


def test_outside_a_recording_it_is_a_plain_call() -> None:
    assert add(1, b=2) == 3
    assert add.__name__ == "add" and add.__doc__ == "Adds."


def test_a_session_gets_the_call() -> None:
    session = Session()
    with breaking(session):
        assert add(1, b=2) == 3
    assert add(5) == 6
    assert session.seen == [("add", (1,), {"b": 2})]


def test_a_break_inside_a_break_is_a_plain_call() -> None:
    @graph_break
    def outer(a: int) -> int:
        return add(a) * 2

    session = Session()
    with breaking(session):
        assert outer(1) == 4
    assert [name for name, *_ in session.seen] == [
        "test_a_break_inside_a_break_is_a_plain_call.<locals>.outer",
    ]


def test_an_error_ends_the_session() -> None:
    session = Session()
    with pytest.raises(KeyError), breaking(session):
        raise KeyError
    add(1)
    assert not session.seen


def test_names() -> None:
    session = Session()
    with breaking(session):
        graph_break(add.__wrapped__, name="mine")(1)
        graph_break(functools.partial(add.__wrapped__, 1))()
    assert [name for name, *_ in session.seen] == ["mine", "partial"]
