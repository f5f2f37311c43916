"""Assembled pipelines without their weights, to take along to a machine with a GPU.

    python benchmarks/structures.py PIPELINE... --out GRAPHS [--cache DIR]

Of each pipeline folder: its small files, and for each submodel the structure (a graph without weights, `parameters.json`,
`config.json`), which the step before BindWeights left in the cache, and its record, by which a proof finds the recipes
(`proof_on_gpu.py`). Some MB for Stable Diffusion XL.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

ACTIONS = "actions"


def structure(cache: Path, steps: list[dict]) -> tuple[Path, Path]:
    """The artifact of the step before the last, and its record. Raises SystemExit where the cache does not have it any more."""
    action = steps[-2]["action"]
    record = cache / "v1/actions" / action[:2] / f"{action}.json"
    if steps[-1]["pass"] != "BindWeights" or not record.exists():
        raise SystemExit(f"no structure of {steps[-1]['pass']} in {cache}: build the pipeline again")
    digest = json.loads(record.read_text())["record"]["object"]
    return cache / "v1/objects" / digest[:2] / digest / "files", record


def take(pipeline: Path, cache: Path, out: Path) -> None:
    manifest = json.loads((pipeline / "sdflow.json").read_text())
    submodels = manifest["submodels"]
    shutil.copytree(
        pipeline, out, ignore=lambda folder, names: [n for n in names if Path(folder) == pipeline and n in submodels]
    )
    actions = out.parent / ACTIONS
    actions.mkdir(exist_ok=True)
    for name, each in submodels.items():
        files, record = structure(cache, each["steps"])
        shutil.copytree(files, out / name, copy_function=shutil.copyfile)
        shutil.copyfile(record, actions / record.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipelines", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("cache"))
    arguments = parser.parse_args()
    for pipeline in arguments.pipelines:
        take(pipeline, arguments.cache, arguments.out / pipeline.name)
    size = sum(path.stat().st_size for path in arguments.out.rglob("*") if path.is_file())
    print(f"{arguments.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
