"""Uses caches in every way that reads them, in a process: a wait for a pipe ends with the caller's patience.

    python -m tests.store.used_cache FOLDER ...

Each folder has a `cache` and a `pipeline`. A line of JSON for each says what became of each use: what it gave, or the error in
words.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sdflow.errors import SdflowError
from sdflow.store import Cache

from .builds import assert_complete, build, contents, make_action


def use(folder: Path) -> dict[str, Any]:
    cache, action, said = Cache(folder / "cache"), make_action(), dict[str, Any]()

    def run() -> bool:
        with cache.lease():
            cache.notes.remember_step("a/step", action)
            record = build(cache, action)
            assert_complete(record, contents(action))
            (folder / "pipeline").mkdir(exist_ok=True)
            cache.note_output_folder(folder / "pipeline")
            cache.pin("p", [record.artifact.digest], folder / "pipeline")
        return True

    uses: dict[str, Callable[[], Any]] = {
        "lookup": lambda: cache.lookup(action) is not None,
        "entries": lambda: len(cache.entries()),
        "last step": lambda: cache.notes.last_action("a/step") is not None,
        "dry gc": lambda: cache.gc(dry_run=True).orphans,
        "build": run,
        "verify": lambda: len(cache.verify().damaged),
        "gc": lambda: cache.gc().orphans,
        "build again": run,
    }
    for name, do in uses.items():
        try:
            said[name] = do()
        except SdflowError as error:
            said[name] = f"{type(error).__name__}: {error.what}"
    return said


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(json.dumps(use(Path(each))), flush=True)
