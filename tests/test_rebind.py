"""Single instances with other behaviour: classes, other instances and their modules see nothing."""

import mlx.nn as nn
import pytest

from ds4cli.hooks.rebind import Swaps, calls, derived, names_used, rebound, with_globals


def scale(x):
    return 10 * x


def shift(x):
    return x + 1


class Base(nn.Module):
    def __call__(self, x, times=1, *, more=0):
        return times * scale(x) + more


class Cell(Base):
    def __call__(self, x, times=2, *, more=0):
        return super().__call__(shift(x), times, more=more)


def doubled(function):
    return lambda x: 2 * function(x)


def test_a_name_means_something_else_in_one_class_only():
    """The module's own global replaced: every model in the process ran our code."""
    twin = rebound(Cell, {"shift": doubled})
    cell, other = Cell(), Cell()
    other.__class__ = twin
    assert (cell(1), other(1)) == (2 * 10 * 2, 2 * 10 * 4)
    assert (shift(1), Cell()(1)) == (2, 40)
    both = rebound(twin, {"scale": doubled, "shift": doubled})
    other.__class__ = both
    assert other(1) == 2 * 10 * 8, "one on top of the other; what only a base calls stays"
    base = Base()
    base.__class__ = rebound(Base, {"scale": doubled})
    assert (base(1), Base()(1)) == (20, 10)


def test_a_twin_keeps_defaults_closure_and_names():
    """Calls that leave an argument out failed, as did every `super()`; a print named our class."""
    twin = rebound(Cell, {"shift": doubled})
    cell = Cell()
    cell.__class__ = twin
    assert cell(1, 3, more=5) == 3 * 40 + 5
    assert (twin.__name__, twin.__module__, twin.__mro__[1]) == ("Cell", Cell.__module__, Cell)
    assert isinstance(cell, Cell) and Cell()(1, 3, more=5) == 3 * 20 + 5
    moved = with_globals(Base.__call__, {"scale": lambda x: 7})
    assert (moved(None, 1), moved(None, 1, 2, more=1)) == (7, 15)
    assert moved.__name__ == "__call__" and Base.__call__(None, 1) == 10


def test_what_is_not_called_is_not_changed():
    """A class of its own for every module of a model."""
    twin = rebound(Cell, {"nothing": doubled})
    assert "__call__" not in vars(twin)
    assert "__call__" in vars(derived(Cell, Base.__call__))
    assert calls(Cell, "shift") and not calls(Cell, "scale") and not calls(Cell, "more")
    assert calls(Base, "scale")
    assert {"shift", "super"} <= names_used(Cell) and "items" not in names_used(Cell)


def test_swaps_are_undone_the_latest_first():
    """A model that was loaded twice kept the hooks of the first."""
    swaps, cell = Swaps(), Cell()
    first, second = rebound(Cell, {"shift": doubled}), derived(Cell)
    swaps.swap(cell, first)
    swaps.swap(cell, second)
    assert (len(swaps), type(cell)) == (2, second)
    swaps.undo()
    assert (len(swaps), type(cell)) == (0, Cell)
    swaps.undo()
    with pytest.raises(TypeError):
        swaps.swap(object(), Cell)
