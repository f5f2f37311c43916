"""No false alarm: what the repository's workflows build, at small size and for every target, is verified and must pass.

    python benchmarks/verify_all.py SCRATCH [--full] [--targets cuda cpu ...] [--only shapes_cpu tiny_cpu ...]

The tiny workflow stands for those of Stable Diffusion 1.5: it has their chains and what each target changes. Not for CUDA,
whose BiasSplitGelu and BiasAdd take the widths of Stable Diffusion alone: there the alarm is right. The sample's workflows
are built as they are, with and without LoRAs. Each is built, then verified as `sdflow verify` does it, in this process. One line
each; the exit status is 1 when one does not pass.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from in_process import Here, verified

from sdflow.cli.progress import PlainLines
from sdflow.config import load_workflow
from sdflow.config.workflow import VerifySpec, Workflow
from sdflow.errors import VerificationError
from sdflow.passes import registry
from sdflow.run import RunOptions, run_workflow
from sdflow.store import Cache
from sdflow.targets import TARGETS
from sdflow.verify import Verification

WORKFLOWS = Path(__file__).parents[1] / "workflows"
FAMILIES = (
    "tiny_cpu", "shapes_cpu", "shapes_lora_cpu", "sd15_inpainting_tiny_cpu", "sd15_taesd_tiny_cpu", "sd21_tiny_cpu",
    "sd_turbo_tiny_cpu", "lcm_tiny_cpu", "tiny_controlnet_cpu", "sdxl_tiny_cpu", "sdxl_refiner_tiny_cpu",
    "sdxl_turbo_tiny_cpu", "sdxl_tiny_controlnet_cpu",
)  # fmt: skip
RIGHTLY_REFUSED = {(name, "cuda") for name in FAMILIES if not name.startswith("shapes")}


class Quiet(PlainLines):
    """Steps and phases are not told."""

    def _say(self, text: str) -> None:
        pass


def workflows(names: Sequence[str], targets: Sequence[str], spec: VerifySpec) -> Iterator[Workflow]:
    """One workflow for each pipeline."""
    for name in names:
        for target in targets:
            if (name, target) in RIGHTLY_REFUSED:
                continue
            loaded = load_workflow(WORKFLOWS / f"{name}.yaml", catalog=registry.catalog(), targets=[target])
            for pipeline in loaded.pipelines:
                titled = f"{pipeline.name} for {target}"
                yield replace(loaded, pipelines=(replace(pipeline, name=titled, verify=spec),))


def line(result: Verification) -> str:
    """The largest distance of each submodel in units of its limit, rounded and not, and the image."""
    parts = []
    for name, part in result.submodels.items():
        shares = [each.distance / each.limit for each in part.outputs if each.limit]
        exact = [each.distance / each.limit for each in part.exact]
        parts.append(f"{name} {max(shares, default=0):.2f}" + (f" (unrounded {max(exact):.2f})" if exact else ""))
    image = f", image {result.image.psnr or float('inf'):.1f} dB" if result.image else ""
    return f"of the limit: {', '.join(parts)}{image}"


def main() -> int:
    """Print a line for each pipeline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path, help="folder for the cache and the pipelines")
    parser.add_argument("--full", action="store_true", help="the full level; by itself the quick one, as in a run")
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=FAMILIES, help="these workflows")
    options = parser.parse_args()
    scratch: Path = options.scratch
    run = RunOptions(out=scratch / "pipelines", results=scratch / "results", verify=False, evaluate=False)
    alarms = 0
    for workflow in workflows(options.only, options.targets, VerifySpec(level="full" if options.full else "quick")):
        begun = time.perf_counter()
        (pipeline,) = workflow.pipelines
        try:
            cache = Cache(scratch / "cache")
            (built,) = run_workflow(workflow, cache, run, Quiet()).pipelines
            assert pipeline.verify is not None
            result = verified(built.folder, pipeline.verify, cache, Here())
            result.raise_for_failure()
        except VerificationError as error:
            alarms += 1
            print(f"{pipeline.name}: ALARM after {time.perf_counter() - begun:.0f} s: {error}", flush=True)
            continue
        print(f"{pipeline.name}: passed in {result.seconds:.0f} s; {line(result)}", flush=True)
    print(f"{alarms} alarms")
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
