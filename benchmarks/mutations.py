"""Plants faults in a built pipeline, from a seed, and counts which `sdflow verify --quick` finds.

    python benchmarks/mutations.py pipelines/shapes_cuda --cache cache --out mutations.jsonl [--count 50] [--seed 0]
        [--first 0] [--minutes 5] [--kinds epsilon scaled ...]

The kinds are those of `mutation_kinds.py` and `mutation_kinds_wiring.py`, in turn; place and size come from the seed and the
number of the fault. The digests are written anew, as whoever built the pipeline so would have written them. First the submodel
with the fault is verified, and where that passes the whole pipeline; each ends at the first part that finds something
(`in_process.py`). Of what is missed: how far the image is from the unchanged pipeline's (relative L2), beside fp16 PyTorch's own
distance to fp32 PyTorch. Each result is a line of --out; what is there is not done again, so a run that was ended goes on. The
exit status is 1 when a fault was missed that changes the image by more than that.

The cache is used as it is, and what passes is kept in it: take one that may be thrown away.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from in_process import Found, Here, verified
from mutation_kinds import KINDS as KINDS_OF_NUMBERS
from mutation_kinds import Folder
from mutation_kinds_wiring import WIRING

from sdflow.config.workflow import VerifySpec
from sdflow.distance import relative_l2
from sdflow.errors import SdflowError
from sdflow.families import FAMILIES
from sdflow.store import Cache
from sdflow.verify import images
from sdflow.verify.cases import read_description
from sdflow.verify.judge import Desk
from sdflow.verify.judge_request import JudgeRequest
from sdflow.verify.selection import Selection
from sdflow.verify.torch_images import IMAGE_FILE

KINDS = {**KINDS_OF_NUMBERS, **WIRING}
IN_THE_STRUCTURE = ("the structure does not have it", "is not what the structure has")
"""What is said of a value that came into the graph behind the builder's back. A pass that is wrong would have put it into the
structure too, so this does not count as found."""

TRIES = 8
"""Of one kind, where the place that chance takes first has none of what it changes."""


def counts(problem: str) -> bool:
    return not problem.endswith(IN_THE_STRUCTURE)


class Pipeline:
    """A built pipeline, what it draws, and what PyTorch draws."""

    def __init__(self, folder: Path, cache: Cache, scratch: Path) -> None:
        self.folder, self.cache, self.scratch = folder, cache, scratch
        self.request: JudgeRequest | None = None
        problems = self.problems(folder, None)
        if self.request is not None and not self.request.reference.exists():  # it was computed, and has its place now
            self.request = None
            problems = self.problems(folder, None)
        if problems:
            raise SystemExit(f"the pipeline does not pass as it is: {problems}")
        self.image = self.draw(folder)
        assert self.request is not None
        with np.load(self.request.reference / IMAGE_FILE) as stored:
            self.yardstick = relative_l2(stored["float16"], stored["float32"])

    def problems(self, folder: Path, submodels: list[str] | None) -> list[str]:
        """Why a folder does not pass, by `verify` itself; of one with a fault the first part that says so."""
        here = Here(counts if self.request is not None else None)
        try:
            found = verified(folder, VerifySpec(), self.cache, here, submodels=submodels, fresh=True)
        except Found as found_early:
            return found_early.problems
        except SdflowError as error:
            return [f"refused: {error}"]
        if self.request is None:
            self.request = here.asked
        return [told for where, what, _ in found.problems if counts(told := f"{where}: {what}")]

    def draw(self, folder: Path) -> np.ndarray:
        """The image that the lowered artifacts draw."""
        assert self.request is not None
        request = JudgeRequest.from_json({**self.request.to_json(), "folder": str(folder)})
        desk = Desk(request, lambda phrase: None, {})
        selection = Selection.from_json(read_description(request.reference)["selection"])
        return images.draw(desk.run, FAMILIES[request.family], folder, selection, request.reference).image


def attempt(pipeline: Pipeline, seed: int, number: int, kinds: list[str]) -> dict[str, Any]:
    """Plant a fault and look for it."""
    kind = kinds[number % len(kinds)]
    begun = time.perf_counter()
    planted, folder = None, None
    for turn in range(TRIES):
        place = pipeline.scratch / f"{number}-{turn}"
        folder = Folder(pipeline.folder, place)
        planted = KINDS[kind](folder, random.Random(f"{seed}/{number}/{turn}"))
        if planted is not None:
            break
        shutil.rmtree(place)
    told: dict[str, Any] = {"seed": seed, "number": number, "kind": kind, "planted": planted}
    if planted is None or folder is None:
        return told | {"verdict": "no place"}
    folder.sign()
    try:
        first = [folder.touched] if folder.touched else None
        problems = pipeline.problems(folder.path, first)
        if not problems and first is not None:
            problems = pipeline.problems(folder.path, None)
        told |= {"verdict": "found" if problems else "missed", "problems": [each[:200] for each in problems[:3]]}
        if not problems:
            told["image"] = relative_l2(pipeline.draw(folder.path), pipeline.image)
    except Exception:  # noqa: BLE001 - a traceback is a fault of ours, and the run goes on
        told |= {"verdict": "crash", "problems": [traceback.format_exc()[-600:]]}
    finally:
        shutil.rmtree(folder.path)
    return told | {"seconds": round(time.perf_counter() - begun, 1)}


def table(results: list[dict[str, Any]], yardstick: float) -> int:
    """Print a row for each kind, and each miss; returns how many misses are worse than rounding."""
    kinds = dict.fromkeys(result["kind"] for result in results)
    print(f"{'kind':18} {'found':>6} {'missed':>7} {'crash':>6} {'no place':>9}")
    for kind in kinds:
        of_kind = [result["verdict"] for result in results if result["kind"] == kind]
        print(f"{kind:18}", *(f"{of_kind.count(word):>{width}}" for word, width in WIDTHS.items()))
    grave = 0
    for result in results:
        if result["verdict"] in ("missed", "crash"):
            image = result.get("image", float("inf"))
            grave += not image <= yardstick
            print(f"{result['verdict']}: {result['number']} {result['kind']}: {result['planted']}: image {image:.2e}")
    count: Callable[[str], int] = lambda word: sum(result["verdict"] == word for result in results)  # noqa: E731
    print(
        f"fp16 PyTorch's own image {yardstick:.2e}; {count('found')} found, {count('missed')} missed, {grave} beyond it"
    )
    return grave


WIDTHS = {"found": 6, "missed": 7, "crash": 6, "no place": 9}


def main() -> int:
    """Go through the numbers that are not in --out yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path, help="a pipeline folder that passes")
    parser.add_argument("--cache", type=Path, required=True, help="the cache that it was built with")
    parser.add_argument("--out", type=Path, required=True, help="results, a line of JSON each")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="the number to begin with; the kinds go by it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="end after so many; what is missing is told"
    )
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    options = parser.parse_args()
    results = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(result["seed"], result["number"]) for result in results}
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        pipeline = Pipeline(options.pipeline.absolute(), Cache(options.cache), Path(scratch))
        for number in range(options.first, options.first + options.count):
            if (options.seed, number) in done:
                continue
            if time.perf_counter() - begun > 60 * options.minutes:
                print(f"ended before number {number}, of {options.count}; the same command goes on there")
                break
            results.append(attempt(pipeline, options.seed, number, options.kinds))
            with options.out.open("a") as stream:
                stream.write(json.dumps(results[-1]) + "\n")
            shown = results[-1]
            print(f"{number}: {shown['kind']}: {shown['planted']}: {shown['verdict']}", flush=True)
        return int(table([result for result in results if result["seed"] == options.seed], pipeline.yardstick) > 0)


if __name__ == "__main__":
    sys.exit(main())
