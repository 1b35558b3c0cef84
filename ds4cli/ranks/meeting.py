"""Rank 0 meets the others, if there are to be any."""

from __future__ import annotations

from ds4cli import signals
from ds4cli.errors import UsageError
from ds4cli.ranks import joining, launch
from ds4cli.ranks.group import Leading
from ds4cli.ranks.number import own_rank
from ds4cli.settings import Settings


def meet(settings: Settings) -> Leading | None:
    """The ranks that a launcher, or `settings`, start; None for a process alone."""
    places = _places(settings)
    if places is None and own_rank() is None:
        return None
    if places is None:
        group = joining.lead(None, 0)
        if group is not None:
            signals.at_end(group.close, group.leave)
        return group
    door = joining.Door(launch.addresses(places))
    for place in places:
        place.variables[joining.DOOR] = door.where()
    followers = launch.Followers(places)
    group = joining.lead(door, len(places))
    assert group is not None, "there are others"
    signals.at_end(group.close, group.leave)
    group.after = followers.epitaph
    followers.met()
    return group


def _places(settings: Settings) -> list[launch.Place] | None:
    """Where ranks are to be started; None for nowhere."""
    if settings.hostfile is None and settings.local_ranks == 1:
        return None
    if own_rank() is not None:
        raise UsageError(
            "these ranks were started by a launcher already",
            "leave out `--hostfile` and `--local-ranks`",
        )
    if settings.hostfile is None:
        return launch.local(settings.local_ranks)
    if settings.local_ranks != 1:
        raise UsageError("`--hostfile` and `--local-ranks` contradict each other", "give one")
    return launch.listed(settings.hostfile)
