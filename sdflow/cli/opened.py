"""Open the workflow and the cache of a command, with the cache's remote."""

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
    """Load a workflow by path, or a shipped one by name. Raises WorkflowError."""
    from sdflow.config import load_workflow
    from sdflow.passes.registry import catalog

    return load_workflow(path, catalog=catalog(), overrides=overrides or (), targets=targets or ())


def cache_folder(given: Path | None) -> Path:
    """The folder from `--cache` or $SDFLOW_CACHE, or the default one."""
    if given is not None:
        return given
    from sdflow.store.default import default_cache

    return default_cache()


def made_here(given: Path | None) -> str | None:
    """The notice that the default cache will be created; None if it exists, or the user named a folder."""
    root = cache_folder(given)
    if given is not None or root.exists():
        return None
    return f"creating the cache in {root} (change it with --cache or SDFLOW_CACHE)"


def open_cache(
    given: Path | None, workflows: Sequence[Workflow] = (), *, rehash: bool = False, url: str | None = None
) -> Cache:
    """Open the cache in a folder (None: the default one) with the remote of these workflows, of `url` or of
    $SDFLOW_REMOTE_CACHE.

    Raises UsageError for workflows with different remotes, an unsupported URL, an invalid key, and a root that is a
    file.
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
            remedy="Run the command once for each workflow.",
        )
    named = next(iter(said), None)
    remote = remote_from_environment(named) if url is None else replace(named or RemoteSpec(url), url=at(url, "--url"))
    signer = None if remote is None else signer_from_environment()
    return Cache(root, rehash=rehash, remote=remote, cuts=tensor_offsets, signer=signer)


def remote_of(cache: Cache) -> Remote:
    """The remote of a cache; its notices go to standard error. Raises UsageError if there is none."""
    from sdflow.cli.quiet import say
    from sdflow.errors import UsageError

    if cache.remote is None:
        raise UsageError(
            "no remote cache is named",
            where="sdflow cache",
            remedy="Add --url, set SDFLOW_REMOTE_CACHE, or name a workflow that has `cache: {remote: …}`.",
        )
    cache.remote.tell = say
    return cache.remote
