"""Verify pipelines on a machine that builds nothing: bind their weights, then verify as `sdflow verify --quick` does,
with --run-on also on their target's own hardware.

    python benchmarks/verify/proof_on_gpu.py GRAPHS [--run-on cuda] [--jobs 16]

GRAPHS: output of benchmarks/gpu/structures.py for pipelines that pass. Weights are bound here, as in BindWeights.
Prints the processor seconds of each verification, with the part without rounding separately. `mutations_of_many.py`
plants faults in the same pipelines.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu.pipelines_on_gpu import materialize
from benchmarks.gpu.structures import ACTIONS
from benchmarks.verify.in_process import Here
from sdflow.config.workflow import VerifySpec
from sdflow.manifest import MANIFEST_FILE, REFINER, read_manifest
from sdflow.store import Cache
from sdflow.verify import subject_of_folder, verify
from sdflow.verify.artifact import judge


def fill(graphs: Path, out: Path, cache: Path) -> None:
    """The pipeline with its weights, and its recipes where a verification looks for them."""
    materialize(graphs, out)
    folders = [folder for folder in (graphs, graphs / REFINER) if (folder / MANIFEST_FILE).is_file()]
    chains = [
        (folder / name, chain) for folder in folders for name, chain in read_manifest(folder).origin.chains.items()
    ]
    for structure, chain in chains:
        action = chain.steps[-2].action
        record = (graphs.parent / ACTIONS / f"{action}.json").read_bytes()
        digest = json.loads(record)["record"]["object"]
        place = cache / "v1/objects" / digest[:2] / digest
        place.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):  # another pipeline has the same structure
            (place / "files").symlink_to(structure.absolute())
        where = cache / "v1/actions" / action[:2]
        where.mkdir(parents=True, exist_ok=True)
        (where / f"{action}.json").write_bytes(record)


def verified(folder: Path, cache: Path, run_on: str | None) -> bool:
    """Print what the verification says and what it takes."""
    exact, inner = [0.0], judge.prove

    def timed(*given: object, **more: object) -> object:
        begun = time.process_time()
        try:
            return inner(*given, **more)  # type: ignore[arg-type]
        finally:
            exact[0] += time.process_time() - begun

    judge.prove = timed  # type: ignore[assignment]
    store = Cache(cache)
    subject = subject_of_folder(folder, store)
    run_on = run_on if subject.target == run_on else None
    begun = time.process_time()
    found = verify(subject, VerifySpec(), store, fresh=True, run_on=run_on, group=Here()).result  # type: ignore[arg-type]
    judge.prove = inner
    spent = time.process_time() - begun
    print(
        f"{folder.name}: {'passed' if found.passed else 'FAILED'}; processor {spent:.1f} s, of which {exact[0]:.1f} s exact"
    )
    for where, what, _ in found.problems:
        print(f"  {where}: {what}")
    for name, part in found.submodels.items():
        shares = [each.distance / each.limit for each in part.outputs if each.limit]
        proofs = [each.distance for each in part.exact]
        there = [each.distance / each.limit for each in (part.device.outputs if part.device else ()) if each.limit]
        on_device = f"; on {run_on} {max(there, default=0):.2f}" if part.device else ""
        print(f"  {name}: of the limit {max(shares, default=0):.2f}{on_device}; unrounded {max(proofs, default=0):.1e}")
    if found.image:
        print(f"  image {found.image.psnr} dB", flush=True)
    return found.passed


def main() -> int:
    """1 when one does not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("--run-on", help="a target whose provider runs the artifacts too")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    passed = True
    with tempfile.TemporaryDirectory() as scratch:
        cache = Path(scratch) / "cache"
        found = sorted(path.parent for path in options.graphs.glob(f"*/{MANIFEST_FILE}"))
        filled = [Path(scratch) / "pipelines" / graphs.name for graphs in found]
        filled[0].parent.mkdir()
        with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(fill, found, filled, [cache] * len(found)))
        for each in filled:
            passed &= verified(each, cache, options.run_on)
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
