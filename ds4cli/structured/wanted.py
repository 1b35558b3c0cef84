"""What form a reply is to have. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["json", "regex", "grammar"]


@dataclass(frozen=True)
class Wanted:
    """The form of a reply.

    source: the schema (a dict, or True and False), the pattern, or the grammar's text. name: what
    to call it in messages. unheld: what of a schema its grammar cannot hold a text to; a reply is
    checked for that at its end. unchecked: what nothing checks.
    """

    kind: Kind
    source: Any
    name: str
    unheld: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()

    @property
    def notices(self) -> list[str]:
        """What of a schema is not enforced while a reply is written."""
        late, never = ", ".join(self.unheld), ", ".join(self.unchecked)
        said = [f"{self.name}: {late} cannot be enforced, only checked at the end"] if late else []
        return said + (
            [f"{self.name}: {never} cannot be enforced and is not checked"] if never else []
        )
