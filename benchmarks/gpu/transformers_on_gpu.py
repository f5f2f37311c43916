"""Run beside_float32.py for several models within a limited GPU time.

    python benchmarks/gpu/transformers_on_gpu.py GRAPHS OUT --scratch DIR --seconds 480
        --model '200 NAME [NAME ...] [OPTIONS]' ...

GRAPHS: as for with_weights.py. A model: seconds of device time, pipelines of one checkpoint, and options of
beside_float32.py. While one is measured, the next one's weights are created in DIR, and removed afterwards. OUT gets
the results of each model, NAME.json, after every part, and NAME.log. When the total time is over, unfinished work is
killed; results are printed in any case.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ON_DEVICE = "to the device"
"""The part of a run behind which the next one may load."""


@dataclass
class Model:
    """seconds: on the device. began: when it was there."""

    seconds: float
    names: list[str]
    options: list[str]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    began: float | None = None
    done: bool = False

    @classmethod
    def of(cls, text: str) -> Model:
        seconds, *words = shlex.split(text)
        end = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
        return cls(float(seconds), words[:end], words[end:])

    def start(self, options: argparse.Namespace) -> None:
        log = (options.out / f"{self.names[0]}.log").open("wb")
        weights = [HERE / "with_weights.py", options.graphs, *self.names, "--out", options.scratch]
        beside = [HERE / "beside_float32.py", options.scratch, *self.names, *self.options, "--graphs", options.graphs]
        beside += ["--lock", options.scratch / "device.lock", "--json", options.out / f"{self.names[0]}.json"]
        for command in (weights, beside):
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, *map(str, command)],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, "PYTHONUNBUFFERED": "1"},
                )
            )

    def found(self, out: Path) -> dict[str, Any]:
        file = out / f"{self.names[0]}.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def look(self, options: argparse.Namespace) -> None:
        """Note that it is on the device, or done; end it when its time is over."""
        if self.began is None and ON_DEVICE in self.found(options.out).get("seconds", {}):
            self.began = time.monotonic()
        late = self.began is not None and time.monotonic() > self.began + self.seconds
        if self.processes[-1].poll() is not None or late:
            print(f"{self.names[0]}: {'its time is over' if late else f'ended with {self.processes[-1].returncode}'}")
            self.end(options)

    def end(self, options: argparse.Namespace) -> None:
        for each in self.processes:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()
        for name in self.names:
            shutil.rmtree(options.scratch / name, ignore_errors=True)
        self.done = True


def short(found: Mapping[str, Any]) -> list[str]:
    """What was found, a few lines a pipeline."""
    rows = [
        f"  FAILED {what}: {error.strip().splitlines()[-1][:300]}" for what, error in found.get("errors", {}).items()
    ]
    for name, each in found.get("sdflow", {}).items():
        nodes = sum(sum(label["nodes"].values()) for label in each["placement"].values())
        fallen = sum(len(label["fallen"]) for label in each["placement"].values())
        rows.append(f"  {name}: {fallen} of {nodes} nodes not on the device; loaded in {each['load_s']:.1f} s")
        for submodel, measured in each["submodels"].items():
            worst = max(measured["distances"], key=lambda row: row["distance"] / (row["at_most"] or 1e-30))
            rows.append(
                f"    {submodel} ({measured['precision']}): {worst['distance']:.2e} of at most {worst['at_most']:.2e}"
            )
        rows.append(f"    latents {each['latents']:.4f}, image {each['image']:.4f}; a step {each['step_ms']:.1f} ms;")
        rows.append(
            f"    an image {each['image_s']:.2f} s, first {each['first_image_s']:.2f} s"
            f"; {each['device_gb']:.1f} and {each['used_gb']:.1f} GB"
        )
        rows += [f"    PROBLEM {problem[:200]}" for problem in each["problems"][:6]]
    for kind, plain in found.get("torch", {}).items():
        memory = f"{plain['weights_gb']:.1f} + {plain.get('peak_gb', float('nan')):.1f} GB"
        rows.append(
            f"  PyTorch {kind}: latents {plain['latents']:.4f}, image {plain['image']:.4f}; "
            f"a step {plain['step_ms']:.1f} ms; {memory}"
        )
    for kind in ("turns_ms", "captured_ms"):
        rows += [f"  {statistics.median(times):8.2f} ms a step: {name}" for name, times in found.get(kind, {}).items()]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--model", type=Model.of, action="append", required=True)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    for folder in (options.out, options.scratch):
        folder.mkdir(parents=True, exist_ok=True)
    started: list[Model] = []
    while time.monotonic() < end:
        if len(started) < len(options.model) and (not started or started[-1].began is not None or started[-1].done):
            started.append(options.model[len(started)])
            started[-1].start(options)
        for each in started:
            if not each.done:
                each.look(options)
        if len(started) == len(options.model) and all(each.done for each in started):
            break
        time.sleep(0.3)
    for each in started:
        if not each.done:
            print(f"{each.names[0]}: all the time is over")
            each.end(options)
    for each in started:
        found = each.found(options.out)
        parts = ", ".join(f"{what} {seconds:.0f}" for what, seconds in found.get("seconds", {}).items())
        print(f"{each.names[0]} on {found.get('device')}; seconds: {parts}")
        print("\n".join(short(found)), flush=True)


if __name__ == "__main__":
    main()
