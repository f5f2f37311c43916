"""Copies finished actions between a cache and its remote: a URL, a folder, or an archive."""

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
    missing: int  # actions that this cache lacked; all of them when pushing
    new: tuple[Record, ...]  # downloaded
    sent: Sent


def copy_entries(cache: Cache, actions: Iterable[Action], *, up: bool, whole: bool = False) -> Copied:
    """Push the actions that the remote lacks, or pull those that the cache lacks. whole: pull all of them or none.
    Raises CacheError if the remote becomes unusable; other problems go to `Remote.tell`."""
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
    """Yield the remote of a command. Raises CacheError if it is unusable on entry, during the body, or at the end."""
    assert remote is not None, "it was named"
    try:
        yield remote
        remote.require_usable()
    except Unusable as error:
        remedy = "Check the URL, the network, and the store's credentials."
        raise CacheError(str(error), where=remote.spec.shown, remedy=remedy) from error
