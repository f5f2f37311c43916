"""Build a workflow from an empty cache and measure wall and processor time, the largest step, and the size of the
cache.

    python benchmarks/build/from_zero.py [WORKFLOW] [MODEL] [--scratch DIR] [--jobs N] [--memory] [--same-as CACHE] [--keep]

The default is workflows/sd15_cuda.yaml with synthetic:sd15: 2.6 GB under --scratch, removed at the end. Nothing is
verified or evaluated. Processor time is user and system time of the command and its child processes: compare it if the
machine is busy. A step's peak memory includes shared pages of packages. `--memory` adds "together", the largest sum
over all processes with shared pages counted once. It samples ten times a second, which slows the run: measure time
without it. `--same-as` compares every artifact with another cache's: an equal step with other bytes is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]


def records(cache: Path) -> dict[str, dict]:
    """Action digest -> its record, of all that a cache holds."""
    found = {}
    for path in sorted((cache / "v1/actions").glob("*/*.json")):
        found[path.stem] = json.loads(path.read_text())["record"]
    return found


def together(process: psutil.Popen) -> int:
    """The memory of a process and all below it, in bytes, shared pages counted once (PSS)."""
    total = 0
    for one in (process, *process.children(recursive=True)):
        try:
            total += one.memory_full_info().pss
        except psutil.Error:
            continue  # it has just ended
    return total


def build(workflow: Path, model: str, cache: Path, scratch: Path, jobs: int | None, memory: bool) -> dict[str, float]:
    """Run the command; returns its figures."""
    command = [sys.executable, "-m", "sdflow", "run", str(workflow), "--set", f"model={model}"]
    command += ["--no-verify", "--no-evaluate", "--cache", str(cache), "--out", str(scratch / "pipelines")]
    command += ["--results", str(scratch / "results"), *(["--jobs", str(jobs)] if jobs else [])]
    before, begun, most = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter(), 0
    process = psutil.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while True:
        try:
            status = process.wait(0.1 if memory else None)
            break
        except psutil.TimeoutExpired:
            most = max(most, together(process))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if status:
        sys.exit(f"{' '.join(command)}: status {status}")
    return {
        "wall": time.perf_counter() - begun,
        "user": after.ru_utime - before.ru_utime,
        "system": after.ru_stime - before.ru_stime,
        "together": most,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workflow", nargs="?", type=Path, default=ROOT / "workflows/sd15_cuda.yaml")
    parser.add_argument("model", nargs="?", default="synthetic:sd15")
    parser.add_argument("--scratch", type=Path, help="a folder on a disk with room")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--memory", action="store_true", help="measure all processes together; slower")
    parser.add_argument("--same-as", type=Path, metavar="CACHE")
    parser.add_argument("--keep", action="store_true", help="keep the cache, and say where it is")
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="sdflow-from-zero-", dir=arguments.scratch))
    cache = scratch / "cache"
    try:
        print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        figures = build(
            arguments.workflow.absolute(), arguments.model, cache, scratch, arguments.jobs, arguments.memory
        )
        made = records(cache)
        for record in sorted(made.values(), key=lambda record: -record["built"]["seconds"]):
            action, built = record["action"], record["built"]
            name = f"{action['submodel']:15} {action['pass']['name']:28}"
            print(f"  {name} {built['seconds']:7.1f} s {built['peak_memory'] / 1e6:6.0f} MB")
        size = sum(path.stat().st_size for path in (cache / "v1/objects").rglob("*") if path.is_file())
        largest = max(record["built"]["peak_memory"] for record in made.values())
        together = f"together {figures['together'] / 1e9:.2f} GB, " if arguments.memory else ""
        print(
            f"{len(made)} steps: wall {figures['wall']:.1f} s, user {figures['user']:.1f} s, system {figures['system']:.1f} s, "
            f"largest process {largest / 1e9:.2f} GB, {together}"
            f"cache {size / 1e9:.2f} GB; load after: {os.getloadavg()[0]:.1f}"
        )
        if arguments.same_as:
            others = records(arguments.same_as)
            common = made.keys() & others.keys()
            wrong = [key for key in common if made[key]["object"] != others[key]["object"]]
            print(
                f"{len(common)} of {len(made)} steps are in {arguments.same_as} too; {len(wrong)} have other bytes there"
            )
            for key in wrong:
                print(f"  {made[key]['action']['submodel']} {made[key]['action']['pass']['name']} {key[:12]}")
            if wrong or not common:
                sys.exit(1)
    finally:
        if arguments.keep:
            print(f"kept: {cache}")
        else:
            shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
