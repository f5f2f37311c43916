"""Where the time of an image goes outside the runs of its submodels.

    python benchmarks/gpu/image_gaps.py PIPELINE [--steps 4] [--size N] [--images 7] [--output np] [--target cuda]

PIPELINE: with weights. Events are recorded before and after each run of a session, and nothing waits for the device until
the image is there. Prints medians: when the host asked for a run, when the device began it, how long it took, and how long
the device waited before it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # before ONNX Runtime

PROMPT = "a photo of an astronaut riding a horse on mars"


class Marks:
    """Moments of one image: of the host, and on a device of its stream."""

    def __init__(self, target: str) -> None:
        self._events = target == "cuda"
        self.noted: list[tuple[str, float, Any]] = []

    def note(self, what: str) -> None:
        event = None
        if self._events:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.noted.append((what, time.perf_counter(), event))

    def told(self) -> list[tuple[str, float, float]]:
        """What, milliseconds on the host, milliseconds on the device, both from the first moment on."""
        _, begun, first = self.noted[0]
        return [
            (what, 1e3 * (at - begun), 1e3 * (at - begun) if event is None else first.elapsed_time(event))
            for what, at, event in self.noted
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--size", type=int)
    parser.add_argument("--images", type=int, default=7)
    parser.add_argument("--output", choices=("np", "pil"), default="np")
    parser.add_argument("--target", default="cuda")
    options = parser.parse_args()
    from sdflow.runtime.pipeline import Pipeline
    from sdflow.runtime.sessions.bound import Bound

    size = {} if options.size is None else {"height": options.size, "width": options.size}
    pipeline = Pipeline.load(options.pipeline, options.target, checker=False, keep="all", first=size)
    marks = [Marks(options.target)]
    run = Bound._run

    def noting(bound: Bound) -> None:
        inputs = " ".join(f"{name}{list(value.shape)}" for name, value in list(bound.inputs.items())[:1])
        marks[-1].note(f"run of {inputs}")
        run(bound)
        marks[-1].note("")

    Bound._run = noting  # type: ignore[method-assign]
    generator = torch.Generator()
    for _ in range(options.images + 3):
        marks.append(Marks(options.target))
        with pipeline.place.current():
            marks[-1].note("call")
            drawing = pipeline.drawing(
                PROMPT, num_inference_steps=options.steps, generator=generator.manual_seed(7), **size
            )
            marks[-1].note("prepared")
            drawing.run()
            marks[-1].note("steps queued")
            drawing.finish(options.output)
            marks[-1].note("image")
    tables = [each.told() for each in marks[-options.images :]]
    print(f"{'':48} {'host':>8} {'device':>8} {'took':>8} {'waited':>8} ms")
    ended = 0.0
    for index, (what, _, _) in enumerate(tables[0]):
        host, device = (statistics.median(table[index][column] for table in tables) for column in (1, 2))
        if what.startswith("run"):
            took = statistics.median(table[index + 1][2] - table[index][2] for table in tables)
            print(f"{what[:48]:48} {host:8.2f} {device:8.2f} {took:8.2f} {device - ended:8.2f}")
            ended = device + took
        elif what:
            print(f"{what:48} {host:8.2f} {device:8.2f} {'':8} {device - ended:8.2f}")


if __name__ == "__main__":
    main()
