"""What do the runs of one grid need to do only once? Read and check data, compile programs.

In: a kind of thing, a key that says which, and a function that makes it. Out: the thing, made once as long as its key
does not change. One of each kind is kept, so memory is that of one run, and a grid goes through its cells in an order
in which neighbours share.
"""

from collections.abc import Callable
from typing import Any

# Given to a compiled step at run time, so that runs which differ in nothing else share it.
RUN_TIME_KEYS = ("seed", "learning_rate")


class Shared:
    """Keeps the newest thing of each kind."""

    def __init__(self):
        self._kept: dict[str, tuple[Any, Any]] = {}

    def once(self, kind: str, key: Any, make: Callable[[], Any]) -> tuple[Any, bool]:
        """Returns (thing, whether it was made now)."""
        if kind in self._kept and self._kept[kind][0] == key:
            return self._kept[kind][1], False
        self._kept.pop(kind, None)  # before the next is made: both together may not fit
        thing = make()
        self._kept[kind] = (key, thing)
        return thing, True


def program_key(config, parts: int | None) -> dict[str, Any]:
    """What a run's programs depend on: its config but for the values that are given at run time.

    ``parts`` are those of an earlier start of the run; with ``microbatch="auto"`` they decide where the search begins.
    """
    key = {name: value for name, value in config.to_dict().items() if name not in RUN_TIME_KEYS}
    return key | {"parts": parts if config.microbatch == "auto" else None}
