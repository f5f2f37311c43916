"""A pipeline folder as an earlier sdflow left it: today's artifacts, described by its sdflow.json.

tests/data/earlier_sdflow.json is what `sdflow run workflows/tiny_cpu.yaml` wrote in November 2026, with names in place of
the digests, which depend on the packages that are installed. When the form of manifests changes, it stays as it is; a pass
that a chain got since then is added to it, since the artifacts are today's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from sdflow.build.plan import Plan
from sdflow.digest import digest_file
from sdflow.manifest import MANIFEST_FILE
from sdflow.manifest.provenance import PROVENANCE_FILE
from sdflow.store import Cache

EARLIER = Path(__file__).parents[1] / "data/earlier_sdflow.json"


def as_an_earlier_sdflow(folder: Path, out: Path, plan: Plan, cache: Cache) -> Path:
    """A copy of the folder of tiny_cpu with the earlier sdflow.json. plan: of its workflow, all of it cached."""
    shutil.copytree(folder, out, symlinks=True)
    (out / PROVENANCE_FILE).unlink()  # it had none
    (pipeline,) = plan.pipelines
    found: dict[str, Any] = {}
    for planned in pipeline.steps(cache):
        assert planned.record is not None, f"{planned.step.id} is not in the cache"
        submodel, artifact = planned.step.submodel, planned.record.artifact
        found[f"action of {submodel}/{planned.step.index}"] = planned.record.action.digest
        found[f"artifact of {submodel}"] = artifact.digest  # of the last step, in the end
        files = sorted(path for path in artifact.path.iterdir())
        found[f"files of {submodel}"] = [
            {"bytes": path.stat().st_size, "path": path.name, "sha256": digest_file(path)} for path in files
        ]
    text = EARLIER.read_text(encoding="utf-8")
    for name, value in found.items():
        assert f'"{name}"' in text, f"the earlier sdflow.json has no {name}"
        text = text.replace(f'"{name}"', json.dumps(value))
    assert "artifact of" not in text
    assert "action of" not in text
    (out / MANIFEST_FILE).unlink()
    (out / MANIFEST_FILE).write_text(text, encoding="utf-8")
    return out
