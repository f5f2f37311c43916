"""Worker process of a pass: `python -m sdflow.passes.worker`, driven by `sdflow.processes.workers`."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from sdflow.artifact import CONFIG_FILE, Facts
from sdflow.errors import SdflowError
from sdflow.passes import registry
from sdflow.passes.base import Pass, PassInputs
from sdflow.passes.outcome import require_facts
from sdflow.passes.user_pass import failed_run, is_user_pass
from sdflow.processes.in_worker import serve_request
from sdflow.weights.lora import LoraInput
from sdflow.weights.structure import without_weights, write_parameters


def serve(request: Mapping[str, Any], phase: Callable[[str], None]) -> Mapping[str, Any]:
    """Run one pass for `sdflow.build.chain_run`. Returns its facts, the digests of files hashed while writing, and the
    page sums of the data file and (if hashed) of its base's."""
    digests: dict[str, str] = {}
    sums: list[str | None] = []
    facts = run_pass(request, phase, digests.__setitem__, lambda *found: sums.extend(found))
    return {"facts": facts, "digests": digests, "sums": sums or [None, None]}


def run_pass(
    request: Mapping[str, Any],
    phase: Callable[[str], None],
    hashed: Callable[[str, str], None] = lambda name, sha256: None,
    summed: Callable[[str, str | None], None] = lambda sums, base_sums: None,
) -> Mapping[str, Any]:
    """Run the pass that `request` describes (name, options, input paths) and return its facts.

    If `request["symbolic"]` is set, the pass runs without weights and writes a structure. Raises WeightValueRead if it
    reads a weight's value.
    """
    implementation = registry.find_pass(request["pass"], Path(request["folder"]))
    inputs = PassInputs(
        submodel=request["submodel"],
        model=Path(request["model"]) if request["model"] else None,
        checkpoint=request["checkpoint"],
        family=request["family"],
        loras=tuple(LoraInput(Path(lora["path"]), lora["scale"]) for lora in request["loras"]),
        base=Path(request["base_model"]) if request.get("base_model") else None,
        base_sha256=request.get("base_sha256"),
        base_sums=request.get("base_sums"),
        progress=phase,
        hashed=hashed,
        summed=summed,
    )
    symbolic = bool(request.get("symbolic"))
    out = Path(request["out"])
    with without_weights() if symbolic else nullcontext():
        facts = _run(implementation, request, inputs, out)
    if symbolic and inputs.model is None:
        write_parameters(inputs.submodel, inputs.checkpoint, out)
    if inputs.model is not None and not (out / CONFIG_FILE).exists() and (inputs.model / CONFIG_FILE).exists():
        shutil.copyfile(inputs.model / CONFIG_FILE, out / CONFIG_FILE)  # the architecture stays with the graph
    return facts


def _run(implementation: type[Pass[Any]], request: Mapping[str, Any], inputs: PassInputs, out: Path) -> Facts:
    """Run the pass. Exceptions of a script carry the script's traceback lines; facts of non-sdflow passes are
    checked."""
    name, folder = request["pass"], Path(request["folder"])
    if not is_user_pass(name):
        facts = implementation().run(inputs, out, implementation.Config(**request["config"]))
    else:
        try:
            facts = implementation().run(inputs, out, implementation.Config(**request["config"]))
        except SdflowError:
            raise
        except OSError as cause:
            if cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise failed_run(cause, name, folder) from cause
        except BaseException as cause:  # includes SystemExit, whose status would be mistaken for the worker's
            raise failed_run(cause, name, folder) from cause
    if name not in registry.OWN | registry.APPENDED:
        require_facts(facts, name)
    return facts


if __name__ == "__main__":
    serve_request(serve)
