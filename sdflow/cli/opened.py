"""The workflow and the cache that a command works with, and the remote that goes with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sdflow.config.workflow import Workflow
    from sdflow.store import Cache
    from sdflow.store.remote import Remote


def load(path: Path, overrides: Sequence[str] | None, targets: Sequence[str] | None) -> Workflow:
    """A workflow file, or one that ships with sdflow, by name. Raises WorkflowError."""
    from sdflow.config import load_workflow
    from sdflow.passes.registry import catalog

    return load_workflow(path, catalog=catalog(), overrides=overrides or (), targets=targets or ())


def cache_folder(given: Path | None) -> Path:
    """The folder that `--cache` or $SDFLOW_CACHE names, or the default one."""
    if given is not None:
        return given
    from sdflow.store.default import default_cache

    return default_cache()


def made_here(given: Path | None) -> str | None:
    """What to say of a cache that is about to be made where nobody named a folder; None where it is there, or was named."""
    root = cache_folder(given)
    if given is not None or root.exists():
        return None
    return f"creating the cache in {root} (change it with --cache or SDFLOW_CACHE)"


def open_cache(
    given: Path | None, workflows: Sequence[Workflow] = (), *, rehash: bool = False, url: str | None = None
) -> Cache:
    """The cache in a folder, None: the default one, with the remote of these workflows, or the one that `url` or
    $SDFLOW_REMOTE_CACHE names.

    Raises UsageError for workflows that name different ones, a URL that nothing knows, a key that is none, and for a root
    that is a file.
    """
    from sdflow.errors import UsageError, require_utf8
    from sdflow.onnx_model.tensor_offsets import tensor_offsets
    from sdflow.store import Cache
    from sdflow.store.remote.spec import RemoteSpec, at, remote_from_environment
    from sdflow.store.signing import signer_from_environment

    root = cache_folder(given)
    require_utf8(str(root.resolve()), "--cache")
    said = {workflow.remote: workflow for workflow in workflows if workflow.remote is not None}
    if len(said) > 1:
        raise UsageError(
            "these workflows name different remote caches",
            where=", ".join(workflow.path.name for workflow in said.values()),
            remedy="Give them one at a time.",
        )
    named = next(iter(said), None)
    remote = remote_from_environment(named) if url is None else replace(named or RemoteSpec(url), url=at(url, "--url"))
    signer = None if remote is None else signer_from_environment()
    return Cache(root, rehash=rehash, remote=remote, cuts=tensor_offsets, signer=signer)


def remote_of(cache: Cache) -> Remote:
    """The remote of a cache. What it has to say goes to standard error. Raises UsageError where none is named."""
    from sdflow.cli.quiet import say
    from sdflow.errors import UsageError

    if cache.remote is None:
        raise UsageError(
            "no remote cache is named",
            where="sdflow cache",
            remedy="Give --url, set SDFLOW_REMOTE_CACHE, or name a workflow that has `cache: {remote: …}`.",
        )
    cache.remote.tell = say
    return cache.remote
