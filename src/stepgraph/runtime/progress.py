"""How long work says how far it has come."""

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called with (done, in all, what comes next); a front end draws it."""
