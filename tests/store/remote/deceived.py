"""Builds with a remote that lies, in a process whose memory can be measured: `python -m tests.store.remote.deceived`.

Standard input has JSON: {"cases": [{"url", "cache", "timeout", "trust"}]}; standard output gets one line of JSON for each.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from sdflow.processes.in_worker import peak_memory
from sdflow.store import Cache
from sdflow.store.remote import RemoteSpec

from ..builds import contents, make_action, write_files
from .machines import BUILT, files_of


def built(url: str, cache: str, timeout: float, trust: list[str]) -> dict[str, object]:
    """Two steps as a run builds them; what of them came from the remote, and what was told."""
    told: list[str] = []
    opened = Cache(Path(cache), remote=RemoteSpec(url, False, timeout, tuple(trust)))
    assert opened.remote is not None
    opened.remote.tell = told.append
    begun, fetched, right = time.monotonic(), 0, True
    for name in ("one", "two"):
        action = make_action(name)
        with opened.lease(), opened.lock(action):
            record = opened.fetch(action)
            fetched += record is not None
            if record is None:
                with opened.staging(action) as staging:
                    write_files(staging.files, contents(action))
                    record = staging.publish({"nodes": 3}, BUILT)
        right = right and files_of(record) == contents(action)
    return {
        "fetched": fetched,
        "right": right,
        "told": told,
        "seconds": time.monotonic() - begun,
        "memory": peak_memory(),
        "damaged": len(opened.verify().damaged),
        "closed": opened.remote.unusable or opened.remote.distrusted,
    }


if __name__ == "__main__":
    for case in json.load(sys.stdin)["cases"]:
        print(json.dumps(built(**case)), flush=True)
