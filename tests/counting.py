"""What work costs, in calls: the same on every machine, however busy."""

from __future__ import annotations

import cProfile
from types import TracebackType


class CountedCalls:
    """Around some work: `calls` is then how many functions were called in it, Python's and C's."""

    calls = 0

    def __enter__(self) -> CountedCalls:
        self._profile = cProfile.Profile()
        self._profile.enable()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._profile.disable()
        self.calls = sum(entry.callcount for entry in self._profile.getstats())
