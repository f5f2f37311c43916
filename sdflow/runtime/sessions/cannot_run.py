"""Convert ONNX Runtime's errors about unsupported graphs to readable messages."""

from __future__ import annotations

import re

from sdflow.errors import VerificationError

MOST_SAID = 1000
"""Maximum length of quoted messages: names in a graph can have any length."""

_NO_FLOAT16 = "requires f16 but the device does not support it"

_NO_KERNEL = re.compile(
    r"(?:Failed to find kernel for|Could not find an implementation for) (?P<operator>[\w.]+)\(\d+\)"
    r"(?: node with name '(?P<named>[^']*)'| \(node:'(?P<node>[^']*)')?"
)


def cannot_run(
    provider: str,
    error: Exception,
    *,
    where: str | None = None,
    target: str | None = None,
    built_for: str | None = None,
) -> VerificationError:
    """Return the error for a session that could not be created or run.

    target: the target it was loaded on. built_for: the pipeline's target, if known.
    """
    said = str(error)
    if _NO_FLOAT16 in said:
        return VerificationError(
            f"{provider} cannot run this graph: the GPU adapter does not support float16 (WebGPU's shader-f16)",
            where=where,
            remedy="Build it in float32: `precision: float32` for each submodel of the workflow; see docs/targets.md.",
        )
    found = _NO_KERNEL.search(said)
    if found is None:
        return VerificationError(f"{provider} cannot run this graph: {said[:MOST_SAID]}", where=where)
    operator, node = found["operator"].removeprefix("ai.onnx."), found["named"] or found["node"]
    at = f" (node {node[:MOST_SAID]})" if node else ""
    return VerificationError(
        f"{provider} cannot run this graph: it has no kernel for {operator}{at}",
        where=where,
        remedy=_remedy(target, built_for),
    )


def _remedy(target: str | None, built_for: str | None) -> str | None:
    if target is None or built_for is None:
        return None
    if target == built_for:
        return "Run `sdflow verify PIPELINE` for details, and remove the pass that creates this operator."
    here = "the CPU" if target == "cpu" else target
    return (
        f"The pipeline was built for {built_for}: run it there, or build it for {here} (sdflow run --target {target})."
    )
