"""The options of `sdflow run`. Importing this module loads nothing that builds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from sdflow.parameter import Parameter


@dataclass(frozen=True)
class RunOptions:
    """What a run does besides building uncached steps."""

    out: Annotated[Path, Parameter("Folder for the pipelines, one subfolder each.")] = Path("pipelines")
    results: Annotated[Path, Parameter("Folder for reports, measurements (JSON lines) and images.")] = Path("results")
    copy: Annotated[bool, Parameter("Copy the models, so that the folder is self-contained.")] = False
    rebuild: Annotated[
        bool, Parameter("Rebuild every step of this workflow.", options=("--clean_cache", "--clean-cache"))
    ] = False
    locked: Annotated[bool, Parameter("Refuse inputs that differ from WORKFLOW.lock, which `sdflow lock` writes.")] = (
        False
    )
    check: Annotated[bool, Parameter("Rebuild cached steps and compare digests, replacing nothing.")] = False
    verify: Annotated[bool, Parameter("Verify against PyTorch, as the workflow specifies.")] = True
    evaluate: Annotated[bool, Parameter("Measure latency and generate the workflow's image.")] = True
    require_target: Annotated[bool, Parameter("Fail with status 5 if the target is not available here.")] = False
    keep_failed: Annotated[bool, Parameter("Keep the partial output of a failed pass.")] = False
    jobs: Annotated[
        int | None,
        Parameter(
            "Maximum number of steps to run in parallel, memory permitting.",
            least=1,
            otherwise="2, and 1 for steps that carry weights",
        ),
    ] = None
    on: Annotated[
        str | None,
        Parameter(
            "Run the steps on a Ray cluster: ray, or ray://HOST:PORT. --jobs then defaults to twice its cores.",
            metavar="CLUSTER",
        ),
    ] = None
