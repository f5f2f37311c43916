"""The process that builds structures and binds: `python -m sdflow.weights.worker`, spoken to by `sdflow.workers`.

{"do": "structure", "submodel", "config", "chain": [{"pass", "config"}, ...], "out"}  ->  {"facts": ...}
                                                                or, if a pass looked at a weight:  {"carry": reason}
{"do": "bind", "submodel", "structure", "checkpoint", "loras": [{"path", "scale"}, ...], "base", "base_loras", "out"}
                                                                                              ->  {"facts": ...}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdflow.passes import registry
from sdflow.passes.base import LoraInput
from sdflow.weights.bind import BindRequest, bind
from sdflow.weights.structure import ChainStep, StructureRequest, build_structure
from sdflow.workers import serve_request


def run(request: Mapping[str, Any], phase: Callable[[str], None]) -> Mapping[str, Any]:
    """Carry out one request."""
    out = Path(request["out"])
    if request["do"] == "structure":
        from sdflow.weights.symbol import WeightValueRead

        base = Path.cwd()  # such chains name no pass by path
        chain = [ChainStep(registry.find_pass(step["pass"], base), step["config"]) for step in request["chain"]]
        try:
            return {
                "facts": build_structure(StructureRequest(request["submodel"], request["config"], chain, phase), out)
            }
        except WeightValueRead as read:
            return {"carry": str(read)}

    def progress(done: int, total: int) -> None:
        phase(f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB")

    base_model = request.get("base")
    return {
        "facts": bind(
            BindRequest(
                request["submodel"],
                Path(request["structure"]),
                request["checkpoint"],
                _loras(request["loras"]),
                Path(base_model) if base_model else None,
                _loras(request.get("base_loras", ())),
                progress,
            ),
            out,
        )
    }


def _loras(found: Sequence[Mapping[str, Any]]) -> tuple[LoraInput, ...]:
    return tuple(LoraInput(Path(lora["path"]), lora["scale"]) for lora in found)


if __name__ == "__main__":
    serve_request(run)
