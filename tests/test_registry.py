"""The list of drafters: what follows from it, and that it is true."""

from types import SimpleNamespace

import pytest
from test_docs import ROOT, rows_of, section

from ds4cli.drafters import registry
from ds4cli.drafters.drafter import Drafter
from ds4cli.drafters.making import make
from ds4cli.errors import UsageError
from ds4cli.settings import OPTIONS, resolve


def test_an_unknown_name_is_refused():
    """Guards: a name that nobody knows drafts with ngram, silently."""
    settings = SimpleNamespace(drafter="eagle9", speculate="auto")
    with pytest.raises(UsageError, match=r"no drafter `eagle9`"):
        make(settings, None)


def test_every_entry_names_what_is_there():
    """Guards: an entry whose class is found missing only when somebody drafts with it."""
    for kind in registry.KINDS:
        drafter = kind.part(kind.drafter)
        assert issubclass(drafter, Drafter) and drafter.name == kind.name
        for name in (kind.head, "check") if kind.is_head else ():
            assert callable(kind.part(name))
        assert kind.source != registry.WEIGHTS or callable(kind.part("find"))


def test_settings_follow_the_list():
    """Guards: a new drafter that its flag does not know, or that takes a draft model in vain."""
    assert OPTIONS["drafter"].choices == registry.CHOICES
    for kind in registry.KINDS:
        flags = {"drafter": kind.name, "draft_model": "folder"}
        if kind.may_be_named:
            assert resolve(flags, environ={}).settings.drafter == kind.name
        else:
            with pytest.raises(UsageError, match="contradict"):
                resolve(flags, environ={})


def test_the_tables_of_drafters_are_true():
    """Guards: a drafter that no page names, or one whose needs are told wrongly."""
    page = (ROOT / "ds4cli" / "drafters" / "README.md").read_text(encoding="utf-8")
    rows = rows_of(section("The drafters", page))
    assert rows == {kind.name: [kind.guesses, kind.needs] for kind in registry.KINDS[1:]}
    short = section("Drafting")
    assert all(f"`{name}`" in short for name in (*rows, registry.AUTO))
