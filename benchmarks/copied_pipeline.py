"""What it costs that `--copy` is on the disk before it takes its place: a pipeline of a model's size, copied with and without.

    python benchmarks/copied_pipeline.py [--gigabytes 2.13] [--turns 3] [--scratch DIR]

Random bytes in files of the sizes of SD1.5's submodels in float16. "written" is a copy for the moment, as verification makes
one, whose bytes may still be in memory; "on the disk" is what `--copy` leaves. Medians of the turns, taken in turn.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

from sdflow.artifact import Action, Artifact
from sdflow.build.assemble import assemble
from sdflow.manifest import Origin
from sdflow.store import Cache

SHARES = {"unet": 0.807, "text_encoder": 0.116, "vae_decoder": 0.046, "vae_encoder": 0.031}
BLOCK = 1 << 24


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--gigabytes", type=float, default=2.13)
    arguments.add_argument("--turns", type=int, default=3)
    arguments.add_argument("--scratch", type=Path)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="sdflow-copied-", dir=given.scratch) as scratch:
        folder = Path(scratch)
        scheduler = folder / "scheduler"
        scheduler.mkdir()
        (scheduler / "scheduler_config.json").write_text('{"_class_name": "DDIMScheduler"}')
        cache = Cache(folder / "cache")
        parts = {name: artifact(cache, name, int(given.gigabytes * 1e9 * share)) for name, share in SHARES.items()}
        os.sync()
        seconds: dict[str, list[float]] = {"written": [], "on the disk": []}
        for turn in range(given.turns):
            for what, keeper in (("written", None), ("on the disk", cache)):
                out = folder / f"{turn}-{keeper is None}"
                begun = time.perf_counter()
                assemble(
                    out,
                    parts=parts,
                    companions={"scheduler": scheduler},
                    origin=Origin("copied", "cpu"),
                    copy=True,
                    keeper=keeper,
                    digests=cache.stat,
                )
                seconds[what].append(time.perf_counter() - begun)
                shutil.rmtree(out)
                os.sync()
        for what, taken in seconds.items():
            print(
                f"{what}: {median(taken):.2f} s ({', '.join(f'{each:.2f}' for each in taken)}), load {os.getloadavg()[0]:.1f}"
            )


def artifact(cache: Cache, name: str, size: int) -> Artifact:
    """An artifact with one file of this size."""

    step = {"name": "Random", "version": 1}
    action = Action({"format": 1, "pass": step, "submodel": name, "config": {}, "inputs": {}, "uses": {}, "salt": ""})
    with cache.staging(action) as staging:
        (staging.files / "model.onnx").write_bytes(b"graph")
        with (staging.files / "model.onnx.data").open("wb") as stream:
            for begin in range(0, size, BLOCK):
                stream.write(os.urandom(min(BLOCK, size - begin)))
        return staging.publish({}, {}).artifact


if __name__ == "__main__":
    main()
