"""What `sdflow run` can be told. Its options are derived from this; importing it loads nothing that builds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from sdflow.parameter import Parameter


@dataclass(frozen=True)
class RunOptions:
    """What a run does besides building what is not cached."""

    out: Annotated[Path, Parameter("Folder for the pipelines, one folder each.")] = Path("pipelines")
    results: Annotated[Path, Parameter("Folder for the measurements (JSON lines) and images.")] = Path("results")
    copy: Annotated[bool, Parameter("Copy the models in, so that the folder is self-contained.")] = False
    rebuild: Annotated[
        bool, Parameter("Rebuild every step of this workflow.", options=("--clean_cache", "--clean-cache"))
    ] = False
    check: Annotated[bool, Parameter("Build cached steps again and compare the digests; replaces nothing.")] = False
    verify: Annotated[bool, Parameter("Verify the artifacts against PyTorch, as the workflow says.")] = True
    evaluate: Annotated[bool, Parameter("Measure latency and draw the workflow's image.")] = True
    require_target: Annotated[bool, Parameter("Fail (status 5) if the target's provider is not on this machine.")] = (
        False
    )
    keep_failed: Annotated[bool, Parameter("Keep the unfinished files of a pass that failed.")] = False
    jobs: Annotated[
        int | None,
        Parameter(
            "Steps that may run at a time, memory permitting.",
            least=1,
            otherwise="2, and 1 for steps that carry weights",
        ),
    ] = None
    on: Annotated[
        str | None, Parameter("Run the steps on a Ray cluster: ray, or ray://HOST:PORT.", metavar="CLUSTER")
    ] = None
