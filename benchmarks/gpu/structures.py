"""Write assembled pipelines without their weights, to take to a machine with a GPU.

    python benchmarks/gpu/structures.py PIPELINE... --out GRAPHS [--cache DIR]
    python benchmarks/gpu/structures.py --workflow FILE... [--set KEY=VALUE]... --out GRAPHS [--cache DIR]

Writes the small files of each pipeline folder. For each submodel it adds the structure (a graph without weights,
`parameters.json`, `config.json`) that the step before BindWeights left in the cache, and its record, by which
`proof_on_gpu.py` finds the recipes. Some MB for Stable Diffusion XL. For a workflow it writes the same without records
and builds no pipeline: its chains run up to BindWeights, without the memory or disk space for weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

ACTIONS = "actions"
REFINER = "refiner"


def structure(cache: Path, steps: list[dict]) -> tuple[Path, Path]:
    """The artifact of the step before the last, and its record. Raises SystemExit where the cache does not have it any more."""
    action = steps[-2]["action"]
    record = cache / "v1/actions" / action[:2] / f"{action}.json"
    if steps[-1]["pass"] != "BindWeights" or not record.exists():
        raise SystemExit(f"no structure of {steps[-1]['pass']} in {cache}: build the pipeline again")
    digest = json.loads(record.read_text())["record"]["object"]
    return cache / "v1/objects" / digest[:2] / digest / "files", record


def take(pipeline: Path, cache: Path, out: Path) -> None:
    """A pipeline and, where it has one, its refiner."""
    take_one(pipeline, cache, out, out.parent / ACTIONS)
    if (pipeline / REFINER).is_dir():
        take_one(pipeline / REFINER, cache, out / REFINER, out.parent / ACTIONS)


def take_one(pipeline: Path, cache: Path, out: Path, actions: Path) -> None:
    manifest = json.loads((pipeline / "sdflow.json").read_text())
    submodels, left = manifest["submodels"], {REFINER, *manifest["submodels"]}
    shutil.copytree(
        pipeline, out, ignore=lambda folder, names: [n for n in names if Path(folder) == pipeline and n in left]
    )
    actions.mkdir(exist_ok=True)
    for name, each in submodels.items():
        files, record = structure(cache, each["steps"])
        shutil.copytree(files, out / name, copy_function=shutil.copyfile)
        shutil.copyfile(record, actions / record.name)
    for lora in manifest["loras"]:
        shipped = Path("samples/loras") / Path(lora["reference"]).name
        if (ROOT / shipped).exists():  # from the repository's root, wherever that is
            lora["reference"] = str(shipped)
    (out / "sdflow.json").write_text(json.dumps(manifest, indent=1))


class Progress:
    """Says which steps are done."""

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def expected(self, expected: Any) -> None: ...
    def doing(self, what: str, phase: str) -> None: ...
    def started(self, step: Any) -> None: ...
    def phase(self, step: Any, phrase: str) -> None: ...
    def memory(self, step: Any, resident: int) -> None: ...
    def finished(self, result: Any) -> None:
        print(result.outcome, result.step.id, file=sys.stderr, flush=True)


def without_weights(plan: Any) -> Any:
    """The plan, its chains and its refiner's up to BindWeights."""
    symbolic = tuple(replace(chain, steps=chain.steps[:-1], carried=()) for chain in plan.chains)
    refiner = None if plan.refiner is None else without_weights(plan.refiner)
    return replace(plan, chains=symbolic, refiner=refiner)


def build(workflow: Path, overrides: list[str], cache: Path, out: Path) -> None:
    """The pipelines of a workflow without their weights, each a folder in `out`."""
    from sdflow.build.assemble import assemble
    from sdflow.build.execute import Executor
    from sdflow.build.pipeline_folder import content_of, of_refiner
    from sdflow.build.plan import make_plan
    from sdflow.config import load_workflow
    from sdflow.passes.registry import catalog
    from sdflow.store import Cache

    store = Cache(cache)
    for plan in make_plan(load_workflow(workflow, catalog=catalog(), overrides=overrides), store).pipelines:
        if wrong := [name for name, chain in plan.together.items() if chain.steps[-1].name != "BindWeights"]:
            raise SystemExit(
                f"{workflow}: the weights of {', '.join(wrong)} go through every pass: there is no structure"
            )
        steps = Executor(store, Progress(), jobs=1).run(without_weights(plan))
        refiner = None if plan.refiner is None else content_of(plan.refiner, of_refiner(steps), verified=None)
        assemble(out / plan.pipeline.name, **vars(content_of(plan, steps, verified=None)), refiner=refiner, copy=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipelines", type=Path, nargs="*")
    parser.add_argument("--workflow", type=Path, action="append", default=[])
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help="of the workflows"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("cache"))
    arguments = parser.parse_args()
    if not (arguments.pipelines or arguments.workflow):
        parser.error("name pipelines or workflows")
    for pipeline in arguments.pipelines:
        take(pipeline, arguments.cache, arguments.out / pipeline.name)
    for workflow in arguments.workflow:
        build(workflow, arguments.overrides, arguments.cache, arguments.out)
    size = sum(path.stat().st_size for path in arguments.out.rglob("*") if path.is_file())
    print(f"{arguments.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
