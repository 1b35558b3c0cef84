"""What can go wrong, as one small tree; `cli.py` prints it and exits with `exit_code`.

DS4Error            1  base: one line, plus a hint when there is something to do
├── UsageError      2  bad flag, setting or input; nothing was loaded
├── ModelError      1  the model cannot be loaded or used
├── RankError       1  another rank is lost, or differs: none can go on
├── StateError      1  a rewind, restore or load that is impossible; the session is unchanged
└── Interrupted   130  stopped by the user
"""

from __future__ import annotations


class DS4Error(Exception):
    """A failure to report in one line. Put the offending value in backticks."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(DS4Error):
    """The user gave something that cannot work; nothing was loaded."""

    exit_code = 2


class ModelError(DS4Error):
    """The model cannot be loaded or used."""


class RankError(DS4Error):
    """Another rank of this run is lost, or differs from this one."""


class StateError(DS4Error):
    """The session cannot go where it was asked to go; it is unchanged."""


class Interrupted(DS4Error):
    """The user stopped the run."""

    exit_code = 130
