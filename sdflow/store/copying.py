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
    missing = list({action.digest: action for action in actions}.values())
    sent, new = Sent(), list[Record]()
    with cache.lease(), answering(cache.remote) as remote:
        if not up:
            missing = [action for action in missing if cache.lookup(action) is None]
            if whole and not all(cache.bring(action, stop.check) for action in missing):
                return Copied(len(missing), (), sent)
        for action in missing:
            if up and (record := cache.lookup(action)):
                sent += remote.push(record, stop.check) or Sent()
            elif not up:
                with cache.lock(action, meanwhile=stop.check):
                    record = cache.lookup(action) or cache.fetch(action, stop.check)
                new += [record] if record else []
            remote.require_usable()
    return Copied(len(missing), tuple(new), sent)


@contextmanager
def answering(remote: Remote | None) -> Iterator[Remote]:
    """A remote that is what a command is about. Raises CacheError when it cannot be used, or was given up."""
    assert remote is not None, "it was named"
    try:
        yield remote
        remote.require_usable()
    except Unusable as error:
        remedy = "Look at the URL, the network, and the store's own settings for credentials."
        raise CacheError(str(error), where=remote.spec.shown, remedy=remedy) from error
