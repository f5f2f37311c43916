"""Plant faults in many pipelines at once, without builds, and count which of them `sdflow verify --quick` finds.

    python benchmarks/verify/mutations_of_many.py GRAPHS --out faults.jsonl [--only NAME ...] [--count 512] [--seed 100]
        [--jobs 16] [--minutes 8]
    python benchmarks/verify/mutations_of_many.py --table faults.jsonl ...

GRAPHS: output of benchmarks/gpu/structures.py for pipelines that pass. Each gets its weights, as in BindWeights, and is
verified; then faults are planted as in `mutations.py`. The seed and a fault's number determine the pipeline, kind and
place. All are shuffled, so any number of them is a fair sample. --jobs processes of one thread do the work. A fault
starts as soon as its pipeline is ready, and its result is a line of --out; existing ones are skipped. If the first
results are tracebacks, the run ends. --minutes: start none after this time, and abort those that do not finish soon
after. The second form prints the table of existing results.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.verify.mutations import KINDS, Pipeline, attempt, table
from benchmarks.verify.proof_on_gpu import fill
from sdflow.manifest import MANIFEST_FILE

FIRST_CRASHES = 4
"""Before anything else is known: then the benchmark is broken, not what it tries."""
LONGEST = 240.0
"""Seconds that one task may take. A fault that takes longer counts as a crash."""
GRACE = 20.0
"""Seconds that are left to those that are under way at the end."""


def prepare(graphs: Path, scratch: Path) -> Pipeline:
    folder, cache = scratch / "pipelines" / graphs.name, scratch / "caches" / graphs.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    fill(graphs, folder, cache)
    return Pipeline.passing(folder, cache)


def plant(pipeline: Pipeline, scratch: Path, seed: int, number: int) -> dict[str, Any]:
    return attempt(pipeline, scratch, seed, number, list(KINDS))


def serve(line: Connection) -> None:
    """What each process does: functions, as they are sent, until None is."""
    while (task := line.recv()) is not None:
        function, given = task
        try:
            line.send((function(*given), None))
        except BaseException:  # noqa: BLE001 - it is told, and the next is waited for
            line.send((None, traceback.format_exc()[-1500:]))


@dataclass(frozen=True)
class Task:
    """Something for a process to do. number: of a fault; None to prepare the pipeline."""

    pipeline: str
    number: int | None = None


class Process:
    """One that works by itself, and may die of a graph that crashes ONNX Runtime."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.line, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.task: Task | None = None
        self.begun = 0.0

    def give(self, task: Task, function: Callable[..., Any], given: tuple[Any, ...]) -> None:
        self.task, self.begun = task, time.monotonic()
        self.line.send((function, given))

    def answer(self) -> tuple[Any, str | None]:
        try:
            found: tuple[Any, str | None] = self.line.recv()
        except EOFError:
            self.process.join()
            return None, f"its process died: exit code {self.process.exitcode}"
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.line.close()


class Run:
    """The tasks, the processes, and what is known."""

    def __init__(self, graphs: Sequence[Path], scratch: Path, options: argparse.Namespace) -> None:
        self.graphs = {each.name: each for each in graphs}
        self.scratch, self.options = scratch, options
        self.ready: dict[str, Pipeline] = {}
        out: Path = options.out
        lines = out.read_text().splitlines() if out.exists() else []
        self.results = [each for each in map(json.loads, lines) if each["seed"] == options.seed]
        done = {each["number"] for each in self.results}
        names = sorted(self.graphs)
        places = {n: random.Random(f"{options.seed}/{n}/pipeline").choice(names) for n in range(options.count)}
        order = [number for number in places if number not in done]
        random.Random(options.seed).shuffle(order)
        self.waiting = [Task(places[number], number) for number in order]
        wanted = {task.pipeline for task in self.waiting}
        self.unprepared = [Task(name) for name in names if name in wanted]
        self.begun = time.monotonic()

    def go(self) -> None:
        """Until all is done, or the time is over."""
        end = self.begun + 60 * self.options.minutes
        processes = [Process() for _ in range(self.options.jobs)]
        try:
            while True:
                now = time.monotonic()
                for place, each in enumerate(processes):
                    if each.task is not None and now > each.begun + LONGEST:
                        each.end()
                        self.note(each.task, None, f"took longer than {LONGEST:.0f} s")
                        processes[place] = Process()
                    if processes[place].task is None and now < end:
                        self.feed(processes[place])
                busy = {each.line: each for each in processes if each.task is not None}
                if not busy or now > end + GRACE:
                    return
                for line in wait([*busy], timeout=1):
                    each = busy[line]  # type: ignore[index]
                    found, failed = each.answer()
                    ended, each.task = each.task, None
                    assert ended is not None
                    self.note(ended, found, failed)
                    if not each.process.is_alive():
                        processes[processes.index(each)] = Process()
        finally:
            for each in processes:
                each.end()

    def feed(self, process: Process) -> None:
        """The next task whose pipeline is ready, if there is any."""
        if self.unprepared:
            first = self.unprepared.pop(0)
            process.give(first, prepare, (self.graphs[first.pipeline], self.scratch))
            return
        task = next((each for each in self.waiting if each.pipeline in self.ready), None)
        if task is not None:
            self.waiting.remove(task)
            process.give(
                task, plant, (self.ready[task.pipeline], self.scratch / "faults", self.options.seed, task.number)
            )

    def note(self, task: Task, found: Any, failed: str | None) -> None:
        """What came of a task. Raises SystemExit where there is no sense in going on."""
        if task.number is None:
            if failed is None:
                self.ready[task.pipeline] = found
            else:
                self.waiting = [each for each in self.waiting if each.pipeline != task.pipeline]
            self.say(f"{task.pipeline}: {'ready' if failed is None else f'LEFT OUT: {failed}'}")
            if not self.ready and not self.waiting and not self.unprepared:
                raise SystemExit("no pipeline is ready")
            return
        if failed is not None:
            known = self.ready[task.pipeline].yardstick
            found = {"seed": self.options.seed, "number": task.number, "pipeline": task.pipeline, "yardstick": known}
            found |= {"kind": list(KINDS)[task.number % len(KINDS)], "planted": None, "verdict": "crash"}
            found["problems"] = [failed]
        self.results.append(found)
        with self.options.out.open("a") as stream:
            stream.write(json.dumps(found) + "\n")
        verdicts = Counter(each["verdict"] for each in self.results)
        if found["verdict"] in ("missed", "crash") or len(self.results) in (1, 2, 4) or len(self.results) % 32 == 0:
            told = f"{found['kind']}: {found['planted']}: {found['verdict']}: {found.get('problems')}"
            self.say(f"{task.pipeline} {task.number} {told[:400]}; {dict(verdicts)}")
        if len(self.results) == FIRST_CRASHES == verdicts["crash"]:
            raise SystemExit("the first faults all ended in tracebacks")

    def say(self, what: str) -> None:
        print(f"{time.monotonic() - self.begun:.0f} s: {what}", flush=True)


def print_table(files: Sequence[Path]) -> int:
    results = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    print(
        "by pipeline:", ", ".join(f"{name} {count}" for name, count in Counter(e["pipeline"] for e in results).items())
    )
    seconds = [each["seconds"] for each in results if "seconds" in each]
    print(f"{sum(seconds) / max(1, len(seconds)):.1f} s each, {max(seconds, default=0):.0f} s at most")
    return table(results)


def main() -> int:
    """1 when a fault was missed that changes the image by more than fp16 PyTorch does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path, nargs="?")
    parser.add_argument("--table", type=Path, nargs="+", help="print what these files say, and do nothing")
    parser.add_argument("--out", type=Path, default=Path("faults.jsonl"))
    parser.add_argument("--only", nargs="+", help="these pipelines")
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    options = parser.parse_args()
    if options.table:
        return int(print_table(options.table) > 0)
    if options.graphs is None:
        parser.error("GRAPHS is missing")
    found = sorted(path.parent.absolute() for path in options.graphs.glob(f"*/{MANIFEST_FILE}"))
    graphs = [each for each in found if options.only is None or each.name in options.only]
    if not graphs:
        parser.error(f"there is no pipeline of these names in {options.graphs}")
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # before the processes import torch
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "faults").mkdir()
        Run(graphs, Path(scratch), options).go()
    return int(print_table([options.out]) > 0)


if __name__ == "__main__":
    sys.exit(main())
