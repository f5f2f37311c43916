"""Plant seeded faults in a built pipeline, and count which of them `sdflow verify --quick` finds.

    python benchmarks/verify/mutations.py pipelines/shapes-cuda --cache cache --out mutations.jsonl [--count 50] [--seed 0]
        [--first 0] [--minutes 5] [--kinds epsilon scaled ...]

The kinds are those of `mutation_kinds.py` and `mutation_kinds_wiring.py`, in turn; place and size derive from the seed
and the fault's number. Digests are rewritten, as if the pipeline had been built that way. Verification starts with the
damaged submodel and ends at the first part that finds something (`in_process.py`). For a missed fault it reports the
image's distance from the unchanged pipeline's (relative L2) next to the distance of fp16 from fp32 PyTorch and, if it
is larger, the distance without rounding. Each result is a line of --out; existing ones are skipped, so an interrupted
run resumes. The exit status is 1 if a fault was missed that changes the image more than fp16 PyTorch does, with and
without rounding. `mutations_of_many.py` does this with many pipelines at once.

The cache is used directly, and passed verifications are stored in it: use a disposable one.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from benchmarks.verify.in_process import Asked, Found, Here, Suspicion, verified
from benchmarks.verify.mutated_folder import Folder
from benchmarks.verify.mutation_kinds import KINDS as KINDS_OF_NUMBERS
from benchmarks.verify.mutation_kinds_wiring import WIRING
from sdflow.artifact import MODEL_FILE
from sdflow.config.workflow import VerifySpec
from sdflow.distance import relative_l2
from sdflow.errors import SdflowError
from sdflow.families import FAMILIES
from sdflow.store import Cache
from sdflow.verify import images
from sdflow.verify.artifact.exact import open_exact
from sdflow.verify.artifact.graph import RunnableGraph, read_graph, run_graph
from sdflow.verify.artifact.judge import Desk
from sdflow.verify.artifact.judge_request import JudgeRequest
from sdflow.verify.artifact.stored import DIFFERS, MISSING
from sdflow.verify.reference.selection import read_selection
from sdflow.verify.reference.torch_images import IMAGE_FILE

KINDS = {**KINDS_OF_NUMBERS, **WIRING}
IN_THE_STRUCTURE = (MISSING, DIFFERS)
"""What is said of a value that came into the graph behind the builder's back. A pass that is wrong would have put it into the
structure too, so this does not count as found."""

TRIES = 8
"""Of one kind, where the place that chance takes first has none of what it changes."""


def counts(problem: str) -> bool:
    return not problem.endswith(IN_THE_STRUCTURE)


@dataclass(frozen=True)
class Pipeline:
    """A built pipeline that passes, the image that it draws, and how far fp16 PyTorch's is from fp32 PyTorch's."""

    folder: Path
    cache: Path
    request: JudgeRequest
    image: np.ndarray
    yardstick: float

    @classmethod
    def passing(cls, folder: Path, cache: Path) -> Pipeline:
        """Raises SystemExit for one that does not pass as it is."""
        found = verified(folder, VerifySpec(), Cache(cache), Here())
        if problems := [f"{where}: {what}" for where, what, _ in found.problems]:
            raise SystemExit(f"the pipeline does not pass as it is: {problems}")
        asking = Here(ask_only=True)  # the reference has its place now
        with suppress(Asked):
            verified(folder, VerifySpec(), Cache(cache), asking, fresh=True)
        assert asking.asked is not None
        with np.load(asking.asked.reference / IMAGE_FILE) as stored:
            yardstick = relative_l2(stored["float16"], stored["float32"])
        return cls(folder, cache, asking.asked, drawn(asking.asked, folder), yardstick)

    def problems(self, folder: Path, submodel: str | None, *, graph: bool) -> list[str]:
        """Why a folder does not pass that differs from this in a submodel, or beside them all, by `verify` itself; no more than
        the first part of it says that says anything."""
        here = Here(Suspicion(counts, submodel, graph))
        try:
            found = verified(folder, VerifySpec(), Cache(self.cache), here)
        except Found as found_early:
            return found_early.problems
        except SdflowError as error:
            return [f"refused: {error}"]
        return [told for where, what, _ in found.problems if counts(told := f"{where}: {what}")]


def drawn(request: JudgeRequest, folder: Path, *, rounded: bool = True) -> np.ndarray:
    """The image that a folder's lowered artifacts draw. request: of the pipeline that it is or was. rounded: in their own
    precision; else all arithmetic is in float32, on the weights that are stored."""
    desk = Desk(replace(request, folder=folder), lambda phrase: None)
    graphs: dict[str, RunnableGraph] = {}

    def run(submodel: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if submodel not in graphs:
            place = folder / submodel
            graphs[submodel] = open_exact(read_graph(place / MODEL_FILE), place, {}, threads=request.threads)
        return run_graph(graphs[submodel], inputs)

    selection = read_selection(request.reference)
    family = FAMILIES[request.family]
    return images.draw(desk.run if rounded else run, family, folder, selection, request.reference).image


def attempt(pipeline: Pipeline, scratch: Path, seed: int, number: int, kinds: Sequence[str]) -> dict[str, Any]:
    """Plant a fault and look for it. scratch: for the folder with the fault."""
    kind = kinds[number % len(kinds)]
    begun = time.perf_counter()
    planted, folder = None, None
    for turn in range(TRIES):
        place = scratch / f"{number}-{turn}"
        folder = Folder(pipeline.folder, place)
        planted = KINDS[kind](folder, random.Random(f"{seed}/{number}/{turn}"))
        if planted is not None:
            break
        shutil.rmtree(place)
    told: dict[str, Any] = {"seed": seed, "number": number, "kind": kind, "planted": planted}
    told |= {"pipeline": pipeline.request.name, "yardstick": pipeline.yardstick}
    if planted is None or folder is None:
        return told | {"verdict": "no place"}
    folder.sign()
    try:
        problems = pipeline.problems(folder.path, folder.touched, graph=folder.graph_differs())
        told |= {"verdict": "found" if problems else "missed", "problems": [each[:200] for each in problems[:3]]}
        if not problems:
            told |= change_of_image(pipeline, folder.path)
    except Exception:  # noqa: BLE001 - a traceback is a fault of ours, and the run goes on
        told |= {"verdict": "crash", "problems": [traceback.format_exc()[-600:]]}
    finally:
        shutil.rmtree(folder.path)
    return told | {"seconds": round(time.perf_counter() - begun, 1)}


def change_of_image(pipeline: Pipeline, folder: Path) -> dict[str, float]:
    """How far the image is from the unchanged pipeline's. Where that is more than fp16 PyTorch's own distance, also without any
    rounding: a change that changes nothing, a shift before a normalization, is rounded otherwise too."""
    request = pipeline.request
    told = {"image": relative_l2(drawn(request, folder), pipeline.image)}
    if told["image"] > pipeline.yardstick:
        before, after = (drawn(request, each, rounded=False) for each in (pipeline.folder, folder))
        told["unrounded"] = relative_l2(after, before)
    return told


def table(results: Sequence[dict[str, Any]]) -> int:
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
            unrounded = result.get("unrounded", image)
            grave += not min(image, unrounded) <= result["yardstick"]
            print(
                f"{result['verdict']}: {result['number']} {result['pipeline']}: {result['kind']}: {result['planted']}: "
                f"image {image:.2e}, fp16 PyTorch's own {result['yardstick']:.2e}"
                + (f", without rounding {unrounded:.2e}" if "unrounded" in result else "")
            )
            if result["verdict"] == "crash":
                print(result["problems"][0])
    count: Callable[[str], int] = lambda word: sum(result["verdict"] == word for result in results)  # noqa: E731
    words = ", ".join(f"{count(word)} {word}" for word in WIDTHS)
    print(f"{len(results)} faults: {words}; {grave} missed that change the image by more than fp16 PyTorch does")
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
        pipeline = Pipeline.passing(options.pipeline.absolute(), options.cache.absolute())
        for number in range(options.first, options.first + options.count):
            if (options.seed, number) in done:
                continue
            if time.perf_counter() - begun > 60 * options.minutes:
                print(f"ended before number {number}, of {options.count}; the same command goes on there")
                break
            results.append(attempt(pipeline, Path(scratch), options.seed, number, options.kinds))
            with options.out.open("a") as stream:
                stream.write(json.dumps(results[-1]) + "\n")
            shown = results[-1]
            print(f"{number}: {shown['kind']}: {shown['planted']}: {shown['verdict']}", flush=True)
        return int(table([result for result in results if result["seed"] == options.seed]) > 0)


if __name__ == "__main__":
    sys.exit(main())
