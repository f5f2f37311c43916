"""Test the cache and pipelines under faults: kills, signals, lost writes, full disks, collections, changing inputs.

    python benchmarks/cache/faults.py [--seconds 3600] [--kills N] [--rounds N] [--only KIND ...] [--seed N]
        [--scratch DIR] [--json F]

Runs the small Stable Diffusion (UNet and text encoder, with a LoRA), each in a separate process on one cache:

    small      workers on small made-up artifacts build, read, forget, collect and assemble at once; killed at random moments
    operation  a run is killed before one of its file operations, chosen at random; links and copies
    power      the same, and then every file loses what was not synced, as after a power cut (names are kept: the worst case)
    random     two runs and a collection at once, all killed at random moments
    signal     `sdflow run` gets SIGINT or SIGTERM, once or several times: it must end within three seconds
    full       no file may grow beyond a size chosen at random
    change     the LoRA is replaced at a random moment

After each fault the cache is collected and checked. **bad**: a damaged entry, an incomplete pipeline folder, a digest
other than a fresh cache's, a run that hangs or fails in an unexpected way. **left**: processes, temporary folders,
staging and leases that `gc` did not remove. The exit status is 1 if there is any. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.cache.fault_place import LORAS, ROOT, Place, small_build
from sdflow.build.assemble import assemble
from sdflow.manifest import Origin
from sdflow.store import Cache

EVENTS = {
    *("open", "os.rename", "os.link", "os.mkdir", "os.chmod", "os.remove", "os.rmdir", "os.utime", "os.scandir"),
    *("os.listdir", "os.symlink", "fcntl.flock", "shutil.rmtree", "sqlite3.connect", "ctypes.dlsym"),
}
KINDS = ("small", "operation", "power", "random", "signal", "full", "change")
SECONDS_TO_END = 3.0


class Faults(Place):
    """A method for each kind of fault."""

    def operation(self, *, power: bool = False) -> None:
        number, at = self.chance.randrange(LORAS), self.chance.randrange(self.operations)
        copy = self.chance.random() < 0.4
        durable = {path.stat().st_ino for path in self.files()}
        synced, count = self.folder / "synced.txt", self.folder / "count.txt"
        for path in (synced, count):
            path.write_bytes(b"")

        def body() -> None:
            done = 0
            log = os.open(synced, os.O_WRONLY | os.O_APPEND)
            sync = os.fsync

            def fsync(descriptor: int) -> None:
                sync(descriptor)
                found = os.fstat(descriptor)
                os.write(log, f"{found.st_ino} {found.st_size}\n".encode())

            def hook(event: str, arguments: object) -> None:
                nonlocal done
                if event in EVENTS:
                    done += 1
                    if done > at:
                        os.kill(os.getpid(), signal.SIGKILL)

            os.fsync = fsync
            sys.addaudithook(hook)
            self.run(number, copy=copy)
            count.write_text(str(done))

        status = self.ended(self.start(body))
        if status == 0:
            self.operations = max(200, int(count.read_text() or 0))
        elif status == -signal.SIGKILL:
            self.counts["kills"] += 1
        else:
            self.bad(f"a run ended with {status}: {self.said()}")
        time.sleep(0.3)  # its workers see that it is gone
        if power and status != 0:
            self.cut(durable, {tuple(map(int, line.split())) for line in synced.read_text().splitlines()})

    def power(self) -> None:
        self.lossy = True  # what lost its content is found, put aside and built again
        self.operation(power=True)

    def files(self) -> Iterator[Path]:
        for top in (self.cache / "v1", self.out):
            for directory, _, names in os.walk(top):
                yield from (path for path in (Path(directory) / name for name in names) if not path.is_symlink())

    def cut(self, durable: set[int], synced: set[tuple[int, int]]) -> None:
        """Empty every file that is younger than the run and was not synced at the size that it has."""
        for path in list(self.files()):
            found = path.stat()
            if found.st_ino not in durable and (found.st_ino, found.st_size) not in synced and found.st_size:
                path.chmod(0o644)
                os.truncate(path, 0)
                self.counts["files emptied"] += 1

    def random(self) -> None:
        def collect() -> None:
            mine = random.Random(seed)
            while True:
                Cache(self.cache).gc(mine.choice([None, None, 20_000_000]))
                time.sleep(mine.uniform(0, 0.2))

        seed = self.chance.randrange(1 << 30)
        numbers = self.chance.sample(range(LORAS), 2)
        processes = [self.start(lambda number=number: self.run(number)) for number in numbers] + [self.start(collect)]
        self.chance.shuffle(processes)
        for process in processes:
            time.sleep(self.chance.uniform(0, 2.5))
            self.kill(process)

    def signal(self) -> None:
        number = self.chance.randrange(LORAS)
        command = [sys.executable, "-m", "sdflow", "run", str(self.workflow(number)), "--cache", str(self.cache)]
        more = ["--out", str(self.out), "--results", str(self.folder / "results")]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [*command, *more],
            env=environment,
            cwd=self.folder,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        time.sleep(1 + self.chance.uniform(0, 4))
        workers = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        begun = time.monotonic()
        for _ in range(self.chance.choice([1, 1, 3])):
            process.send_signal(self.chance.choice([signal.SIGINT, signal.SIGTERM]))
            time.sleep(0.02)
        _, errors = process.communicate()
        took = time.monotonic() - begun
        if process.returncode not in (0, 130, -signal.SIGINT, -signal.SIGTERM) or "Traceback" in errors:
            self.bad(f"status {process.returncode} after a signal: {errors[-400:]}")
        if process.returncode < 0 and took > 0.5:
            self.bad(f"killed by the signal after {took:.1f} s")  # before or behind its own time it may be
        if took > SECONDS_TO_END:
            self.bad(f"{took:.1f} s from the signal to the end")
        self.counts["signals"] += 1
        self.counts["slowest end, ms"] = max(self.counts["slowest end, ms"], int(took * 1000))
        self.gone(workers)

    def full(self) -> None:
        number, size = self.chance.randrange(LORAS), int(10 ** self.chance.uniform(2, 6.5))

        def body() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            self.run(number, copy=self.chance.random() < 0.4)

        status = self.ended(self.start(body))
        self.counts["full disks"] += 1
        if status not in (0, 3):
            self.bad(f"status {status} with files of at most {size} bytes: {self.said()}")

    def change(self) -> None:
        number = self.chance.randrange(LORAS)
        delay = self.chance.uniform(0, 4)

        def body() -> None:
            threading.Timer(delay, lambda: self.write_lora(number, content=100)).start()
            self.run(number)

        status = self.ended(self.start(body))
        self.counts["inputs changed"] += 1
        self.counts["inputs changed, refused"] += status == 4
        if status not in (0, 4):
            self.bad(f"status {status} when the LoRA changed: {self.said()}")
        self.write_lora(number)
        self.compare(number)

    def small(self) -> None:
        def work(seed: int) -> None:
            mine, store = random.Random(seed), Cache(self.folder / "small/cache")
            beside = self.folder / "small/scheduler"
            while True:
                name = mine.choice("abcdef")
                roll = mine.random()
                if roll < 0.15:
                    store.gc(mine.choice([None, 0, 60_000]))
                    continue
                with store.lease():
                    parts = {part: small_build(store, f"{name}-{part}", forget=roll < 0.5) for part in ("unet", "vae")}
                    out = self.folder / "small/pipelines" / mine.choice("xyz")
                    assemble(
                        out,
                        parts=parts,
                        companions={"scheduler": beside},
                        origin=Origin(name, "cpu"),
                        copy=mine.random() < 0.3,
                        keeper=store,
                        digests=store.stat,
                    )

        beside = self.folder / "small/scheduler"
        beside.mkdir(parents=True, exist_ok=True)
        (beside / "scheduler_config.json").write_text('{"_class_name": "DDIMScheduler"}')

        def begin() -> int:
            seed = self.chance.randrange(1 << 30)
            return self.start(lambda: work(seed))

        workers = [begin() for _ in range(4)]
        for _ in range(40):
            time.sleep(self.chance.uniform(0, 0.15))
            place = self.chance.randrange(len(workers))
            os.kill(workers[place], signal.SIGKILL)
            if (status := self.ended(workers[place])) != -signal.SIGKILL:
                self.bad(f"a worker on small artifacts ended with {status}: {self.said()}")
            self.counts["kills"] += 1
            workers[place] = begin()
        for process in workers:
            self.kill(process)
        with self.at("small"):
            self.look()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=3600)
    arguments.add_argument("--kills", type=int, help="End when there were so many, too.")
    arguments.add_argument("--rounds", type=int, help="End after so many of each kind.")
    arguments.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    arguments.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    arguments.add_argument("--scratch", type=Path, help="Folder to work in; by default among the temporary ones.")
    arguments.add_argument("--json", type=Path, help="Write the counts here.")
    given = arguments.parse_args()
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="sdflow-faults-", dir=given.scratch) as scratch:
        faults = Faults(Path(scratch).resolve(), random.Random(given.seed))
        if set(given.only) != {"small"}:
            for number in range(LORAS):  # each from a cache of its own, but for what they share
                fresh = faults.folder / "fresh-out"
                faults.run(number, cache=faults.folder / "fresh", out=fresh)
                faults.expected[number] = faults.artifacts(number, fresh)
            shutil.copytree(faults.folder / "fresh", faults.cache, symlinks=True)
        begun = time.monotonic()
        rounds: Counter[str] = Counter()
        while time.monotonic() - begun < given.seconds:
            kind = min(given.only, key=lambda kind: (rounds[kind], faults.chance.random()))
            if faults.counts["kills"] >= (given.kills or sys.maxsize) or rounds[kind] >= (given.rounds or sys.maxsize):
                break
            faults.lossy = False
            if kind != "small":
                faults.forget_some()
            before = len(faults.problems)
            getattr(faults, kind)()
            rounds[kind] += 1
            if kind != "small":
                faults.look()
                if rounds[kind] % 5 == 0:
                    faults.compare(faults.chance.randrange(LORAS))
            for problem in faults.problems[before:]:
                print(f"{kind}: {problem}", flush=True)
        counts = {**faults.counts, "bad": faults.counts["bad"], "left": faults.counts["left"]}
        result = {
            "seed": given.seed,
            "seconds": round(time.monotonic() - begun),
            "rounds": dict(rounds),
            "counts": counts,
        }
        print(json.dumps(result))
        if given.json:
            given.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(1 if counts["bad"] or counts["left"] else 0)


if __name__ == "__main__":
    main()
