"""`cache:` of a workflow: the remote cache that its builds share."""

from __future__ import annotations

from pathlib import Path

from sdflow.config.fields import CacheFields, RemoteFields
from sdflow.config.nodes import Node, YamlMap
from sdflow.config.options import check
from sdflow.config.problems import Problems
from sdflow.store.remote.spec import TIMEOUT, RemoteSpec, is_url, unknown_scheme, without_secrets


def remote_spec(node: YamlMap, folder: Path, problems: Problems) -> RemoteSpec | None:
    """The checked remote, a folder's path made absolute; None where there is none, or problems. folder: where it starts."""
    fields = check(CacheFields, node, "cache", problems)
    if fields is None or fields.remote is None:
        return None
    remote = RemoteFields(url=fields.remote) if isinstance(fields.remote, str) else fields.remote
    place: Node = node.entries["remote"]
    if (remedy := unknown_scheme(remote.url)) is not None:
        problems.add(place.mark, f"{without_secrets(remote.url)!r} is no URL of a remote cache", remedy)
        return None
    url = remote.url if is_url(remote.url) else str((folder / Path(remote.url).expanduser()).resolve())
    timeout = TIMEOUT if remote.timeout is None else remote.timeout
    return RemoteSpec(url, push=fields.push, timeout=timeout, trust=tuple(remote.trust))
