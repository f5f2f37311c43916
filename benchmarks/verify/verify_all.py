"""Check for false alarms: all of the repository's workflows, built at small size for every target, must pass
verification.

    python benchmarks/verify/verify_all.py SCRATCH [--full] [--targets cuda cpu ...] [--only shapes_cpu tiny ...]
        [--jobs 16] [--minutes 5] [--threads 1] [--out lines.jsonl]
    python benchmarks/verify/verify_all.py SCRATCH --take GRAPHS ...
    python benchmarks/verify/verify_all.py SCRATCH --graphs GRAPHS ...

The tiny workflow stands for those of Stable Diffusion 1.5, with the same chains and target-specific changes. The
sample's workflows are built with and without LoRAs. Each is built, then verified as in `sdflow verify`, by --jobs
processes. --take: verify nothing and leave the pipelines in GRAPHS without their weights. --graphs: on a machine that
builds nothing, bind weights to the output of --take or of benchmarks/gpu/structures.py and verify it.

Each result is a line of JSON in --out; existing ones are skipped, so an interrupted run resumes. After --minutes no
more start. The exit status is 1 if one does not pass.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.structures import take
from benchmarks.verify.in_process import Here, verified
from benchmarks.verify.proof_on_gpu import fill
from sdflow.config.workflow import VerifySpec, Workflow
from sdflow.manifest import MANIFEST_FILE
from sdflow.store import Cache
from sdflow.targets import TARGETS
from sdflow.verify import Verification

WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows"
FAMILIES = (
    "tiny", "shapes_cpu", "shapes_lora_cpu", "sd15_inpainting_tiny", "sd15_taesd_tiny", "sd21_tiny",
    "sd_turbo_tiny", "lcm_tiny", "tiny_controlnet", "tiny_ip_adapter", "sdxl_tiny",
    "sdxl_refiner_tiny", "sdxl_turbo_tiny", "lcm_sdxl_tiny", "sdxl_tiny_controlnet",
    "sdxl_tiny_ip_adapter", "sdxl_with_refiner_tiny",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A pipeline to verify. source: a workflow's file or name, or the folder of a pipeline without its weights. shared: the cache
    that is built in; none for a pipeline without its weights, which gets one of its own."""

    name: str
    source: Path
    target: str
    scratch: Path
    level: str
    threads: int
    shared: Path | None


def tasks_of_workflows(names: Sequence[str], targets: Sequence[str], **more: Any) -> Iterator[Task]:
    for target in targets:
        for name in names:
            own, shared = WORKFLOWS / f"{name}.yaml", more["scratch"] / "cache"
            path = own if own.is_file() else Path(name)  # a base that ships with sdflow is loaded by its name
            for pipeline in load(path, target).pipelines:
                yield Task(pipeline.name, path, target, shared=shared, **more)


def tasks_of_graphs(graphs: Path, names: Sequence[str], targets: Sequence[str], **more: Any) -> Iterator[Task]:
    for path in sorted(each.parent for each in graphs.glob(f"*/{MANIFEST_FILE}")):
        target = json.loads((path / MANIFEST_FILE).read_text())["target"]
        if target in targets and path.name.startswith(tuple(f"{name}-" for name in names)):
            yield Task(path.name, path, target, shared=None, **more)


def load(path: Path, target: str) -> Workflow:
    """The workflow for one target, each of its pipelines called by it too."""
    from sdflow.config import load_workflow
    from sdflow.passes import registry

    found = load_workflow(path, catalog=registry.catalog(), targets=[target])
    named = (replace(each, name=f"{each.name.removesuffix(f'-{target}')}-{target}") for each in found.pipelines)
    return replace(found, pipelines=tuple(named))


def built(task: Task) -> tuple[Path, Path]:
    """The pipeline's folder, and the cache that has its recipes."""
    if task.shared is None:
        out, cache = (task.scratch / place / task.name for place in ("pipelines", "caches"))
        out.parent.mkdir(parents=True, exist_ok=True)
        fill(task.source, out, cache)
        return out, cache
    (folder,) = build([task], task.shared)
    return folder, task.shared


def build(tasks: Sequence[Task], cache: Path) -> list[Path]:
    """The folders of pipelines, built in one run. Nothing is verified."""
    from sdflow.cli.progress import Silent
    from sdflow.run.run import RunOptions, run_workflow

    loaded = {(each.source, each.target): load(each.source, each.target) for each in tasks}
    pipelines = [
        pipeline
        for task in tasks
        for pipeline in loaded[task.source, task.target].pipelines
        if pipeline.name == task.name
    ]
    whole = replace(next(iter(loaded.values())), pipelines=tuple(pipelines))
    scratch = tasks[0].scratch
    options = RunOptions(out=scratch / "pipelines", results=scratch / "results", verify=False, evaluate=False)
    return [each.folder for each in run_workflow(whole, Cache(cache), options, Silent()).pipelines]


def take_all(tasks: Sequence[Task], graphs: Path) -> int:
    """Build pipelines, and leave them without their weights."""
    graphs.mkdir(parents=True, exist_ok=True)
    missing = [each for each in tasks if each.shared is not None and not (graphs / each.name).exists()]
    if missing and missing[0].shared is not None:
        for folder in build(missing, missing[0].shared):
            take(folder, missing[0].shared, graphs / folder.name)
            shutil.rmtree(folder)
    print(f"{len(missing)} of {len(tasks)} pipelines built and taken")
    return 0


def verify_one(task: Task) -> dict[str, Any]:
    """What one pipeline's verification says."""
    begun = time.perf_counter()
    told: dict[str, Any] = {"name": task.name, "target": task.target}
    try:
        folder, cache = built(task)
        spec = VerifySpec(level=task.level)  # type: ignore[arg-type]
        result = verified(folder, spec, Cache(cache), Here(), threads=task.threads)
    except Exception:  # noqa: BLE001 - it is told, and the run goes on
        return told | {"passed": False, "problems": [traceback.format_exc()[-800:]], "line": ""}
    problems = [f"{where}: {what}" for where, what, _ in result.problems]
    cases = [asdict(case) | {"submodel": name} for name, part in result.submodels.items() for case in part.cases]
    seconds = round(time.perf_counter() - begun, 1)
    return told | {
        "passed": result.passed, "problems": problems, "line": line(result), "seconds": seconds, "cases": cases,
    }  # fmt: skip


def line(result: Verification) -> str:
    """The largest distance of each submodel in units of its limit, rounded and not, and the image."""
    parts = []
    for name, part in result.submodels.items():
        shares = [each.distance / each.limit for each in part.outputs if each.limit]
        exact = [each.distance / each.limit for each in part.exact]
        drawn = len({each.case for each in part.cases if each.draws > 1})
        unrounded = f" (unrounded {max(exact):.2f})" if exact else ""
        parts.append(f"{name} {max(shares, default=0):.2f}{unrounded}{f', {drawn} drawn again' if drawn else ''}")
    image = f", image {result.image.psnr or float('inf'):.1f} dB" if result.image else ""
    both = f", with the refiner {result.ensemble.psnr or float('inf'):.1f} dB" if result.ensemble else ""
    return f"of the limit: {', '.join(parts)}{image}{both}"


def table(results: Sequence[dict[str, Any]]) -> None:
    """How many passed of those that were verified, by workflow and target."""
    found: dict[str, dict[str, list[bool]]] = {}
    for each in results:
        of_name = found.setdefault(each["name"].removesuffix(f"-{each['target']}"), {})
        of_name.setdefault(each["target"], []).append(each["passed"])
    print("passed and run", *TARGETS, sep=" | ")
    for name in sorted(found):
        cells = (found[name].get(target, []) for target in TARGETS)
        print(name, *(f"{sum(cell)}/{len(cell)}" if cell else "-" for cell in cells), sep=" | ")


def main() -> int:
    """Print a line for each pipeline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path, help="folder for the cache and the pipelines")
    parser.add_argument("--full", action="store_true", help="the full level; by itself the quick one, as in a run")
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=FAMILIES, help="these workflows")
    parser.add_argument("--graphs", type=Path, help="pipelines without their weights, in place of workflows")
    parser.add_argument("--take", type=Path, help="verify nothing; leave the pipelines here without their weights")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of ONNX Runtime, in each process")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none after so many")
    parser.add_argument("--out", type=Path, help="results, a line of JSON each")
    options = parser.parse_args()
    out: Path = options.out or options.scratch / "verify_all.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    results = [json.loads(each) for each in out.read_text().splitlines()] if out.exists() else []
    done = {each["name"] for each in results}
    level = "full" if options.full else "quick"
    more = {"scratch": options.scratch.absolute(), "level": level, "threads": options.threads}
    found = (
        tasks_of_workflows(options.only, options.targets, **more)
        if options.graphs is None
        else tasks_of_graphs(options.graphs.absolute(), options.only, options.targets, **more)
    )
    tasks = [each for each in found if each.name not in done]
    if options.take is not None:
        return take_all(tasks, options.take.absolute())
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # before the processes import torch
    end = time.monotonic() + 60 * options.minutes
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool, out.open("a") as stream:
        waiting = [pool.submit(verify_one, each) for each in tasks]
        for ended in as_completed(waiting):
            if ended.cancelled():
                continue
            result = ended.result()
            results.append(result)
            stream.write(json.dumps(result) + "\n")
            stream.flush()
            word = f"passed in {result['seconds']:.0f} s" if result["passed"] else f"ALARM {result['problems']}"
            print(f"{result['name']}: {word}; {result['line']}", flush=True)
            if time.monotonic() > end:
                for each in waiting:
                    each.cancel()
    table(results)
    alarms = sum(not each["passed"] for each in results)
    print(f"{len(results)} of {len(done) + len(tasks)} pipelines verified, {alarms} alarms")
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
