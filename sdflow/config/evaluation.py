"""`evaluate` and `verify` of a workflow: what is measured of a pipeline once it is built, and how it is proved."""

from __future__ import annotations

from sdflow.config.chain import is_null
from sdflow.config.fields import EvaluateFields, VerifyFields, evaluate_spec, verify_spec
from sdflow.config.merge import expect_kind
from sdflow.config.nodes import Node, YamlMap, YamlScalar
from sdflow.config.options import check
from sdflow.config.problems import Problems
from sdflow.config.workflow import EvaluateSpec, VerifySpec


def evaluate_of(node: Node | None, problems: Problems) -> EvaluateSpec:
    """What is measured; null: nothing. What is wrong is told to `problems`."""
    if node is None:
        return EvaluateSpec()
    if is_null(node):
        return EvaluateSpec(latency=None, image=None)
    if not isinstance(node, YamlMap):
        expect_kind(node, "a map of latency, image and allow_fallback, or null", "`evaluate`", problems)
        return EvaluateSpec()
    fields = check(EvaluateFields, node, "evaluate", problems)
    return evaluate_spec(fields) if fields else EvaluateSpec()


def verify_of(node: Node | None, problems: Problems) -> VerifySpec | None:
    """How the pipeline is proved; None: it is not."""
    if node is None:
        return VerifySpec()
    if isinstance(node, YamlScalar):
        if node.value in (None, False, "off"):
            return None
        if node.value in (True, "quick", "full"):
            return VerifySpec(level="full" if node.value == "full" else "quick")
    if not isinstance(node, YamlMap):
        expect_kind(node, "quick, full, false, or a map of level, steps, height and width", "`verify`", problems)
        return None
    fields = check(VerifyFields, node, "verify", problems)
    return verify_spec(fields) if fields else None
