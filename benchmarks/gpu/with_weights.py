"""Bind weights to graphs once, for several benchmarks.

    python benchmarks/gpu/with_weights.py GRAPHS NAME [NAME ...] --out DIR

GRAPHS, NAME: as in benchmarks/gpu/pipelines_on_gpu.py. DIR/NAME is the input of its --weights and of
benchmarks/gpu/step_latency.py. Pipelines are created in parallel processes; existing ones are kept. A submodel with the
same graph and checkpoint as another pipeline's becomes a link. DIR/NAME.made appears when DIR/NAME is complete.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def first_of_each(graphs: Path, names: Sequence[str]) -> dict[tuple[str, str], str]:
    """(pipeline, submodel) -> the first pipeline that has the same: its structure and its checkpoint's tensors."""
    from sdflow.digest import digest_json
    from sdflow.manifest import read_manifest
    from sdflow.sources import PlainDigests, reopen_checkpoint

    seen: dict[str, str] = {}
    first = {}
    for name in names:
        manifest = read_manifest(graphs / name)
        checkpoint = reopen_checkpoint(manifest.origin, str(graphs / name), digests=PlainDigests())
        for part in manifest.parts:
            files = {
                str(file.relative_to(graphs / name / part)): file.read_bytes().hex()
                for file in sorted((graphs / name / part).rglob("*"))
                if file.is_file()
            }
            load = dict(checkpoint.submodels[part].load)
            first[name, part] = seen.setdefault(digest_json([part, load, files]), name)
    return first


def make(graphs: Path, name: str, out: Path, links: dict[str, str]) -> tuple[str, float]:
    """One pipeline; links: submodel -> the pipeline that has it."""
    from benchmarks.gpu.pipelines_on_gpu import materialize
    from benchmarks.gpu.unattended import MADE

    begun = time.perf_counter()
    materialize(graphs / name, out / name, linked={part: out / other / part for part, other in links.items()})
    (out / name).with_suffix(MADE).touch()
    return name, time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    first = first_of_each(options.graphs, options.names)
    with ProcessPoolExecutor(len(options.names)) as pool:
        made = [
            pool.submit(
                make,
                options.graphs,
                name,
                out,
                {part: other for (each, part), other in first.items() if each == name and other != name},
            )
            for name in options.names
            if not (out / name).exists()
        ]
        for each in made:
            name, seconds = each.result()
            print(f"{name}: {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
