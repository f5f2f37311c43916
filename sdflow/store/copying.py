"""Copies of finished actions between a cache and its remote: a URL, a folder, or an archive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sdflow import stop
from sdflow.artifact import Action, Record
from sdflow.errors import CacheError
from sdflow.store.cache import Cache
from sdflow.store.remote.remote import Remote
from sdflow.store.remote.share import Unusable
from sdflow.store.remote.up import Sent

_REMEDY = "Look at the URL, the network, and the store's own settings for credentials."


@dataclass(frozen=True)
class Copied:
    """missing: how many the other side did not have. new: of those, what this cache has now. sent: what the remote has now."""

    missing: int
    new: tuple[Record, ...]
    sent: Sent


def copy_entries(cache: Cache, actions: Iterable[Action], *, up: bool, whole: bool = False) -> Copied:
    """Copy what the other side does not have: up to the remote, or down from it. whole: all of it or nothing.

    Raises CacheError when the remote cannot be used; what it says otherwise, `Remote.tell` gets.
    """
    chosen = list({action.digest: action for action in actions}.values())
    with cache.lease(), answering(cache.remote) as remote:
        if up:
            sent = Sent()
            for each in filter(None, map(cache.lookup, chosen)):
                sent += remote.push(each, stop.check) or Sent()
                require_usable(remote)
            return Copied(len(chosen), (), sent)
        missing = [action for action in chosen if cache.lookup(action) is None]
        if whole and not all(cache.bring(action, stop.check) for action in missing):
            require_usable(remote)
            return Copied(len(missing), (), Sent())
        new = []
        for action in missing:
            with cache.lock(action, meanwhile=stop.check):
                record = cache.lookup(action) or cache.fetch(action, stop.check)
            require_usable(remote)
            new += [] if record is None else [record]
        return Copied(len(missing), tuple(new), Sent())


@contextmanager
def answering(remote: Remote | None) -> Iterator[Remote]:
    """A remote that is what a command is about. Raises CacheError when it cannot be used."""
    assert remote is not None, "it was named"
    try:
        yield remote
    except Unusable as error:
        raise CacheError(str(error), where=remote.spec.shown, remedy=_REMEDY) from error


def require_usable(remote: Remote) -> None:
    """Raises CacheError for one that was given up."""
    if (why := remote.unusable or remote.distrusted or remote.closed) is not None:
        raise CacheError(why, where=remote.spec.shown, remedy=_REMEDY)
