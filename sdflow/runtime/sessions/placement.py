"""Check which execution provider runs each node of a session, and whether the target's runs all.

Nodes that only compute shapes are counted separately: GPU providers deliberately leave them to the CPU, where shapes
are known first. They cause no additional transfers, so they are reported but not counted as fallback.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.errors import VerificationError
from sdflow.onnx_model.float8 import DOMAIN
from sdflow.onnx_model.reading import load_graph
from sdflow.runtime.sessions.engine_cache import Shapes
from sdflow.runtime.sessions.session import PLAIN, LoadOptions, create_session
from sdflow.runtime.sessions.shape_nodes import shape_nodes
from sdflow.targets import CPU_PROVIDER, Target

if TYPE_CHECKING:
    import numpy as np
    import onnxruntime


@dataclass(frozen=True)
class PlacedNode:
    """A node and the provider that runs it. A fused node counts as its parts."""

    name: str
    op_type: str
    domain: str
    provider: str

    def __str__(self) -> str:
        op_type = f"{self.domain}.{self.op_type}" if self.domain else self.op_type
        return f"{self.name or '(no name)'} ({op_type}) on {self.provider}"


@dataclass(frozen=True)
class Placement:
    """Placement of a submodel's nodes.

    nodes: provider -> number of nodes. shapes_on_cpu: number of CPU nodes that only compute shapes. fallen: other nodes
    that the target's provider did not take. own_kernels: number of nodes that run in `sdflow.runtime.kernels`.
    """

    provider: str
    nodes: dict[str, int]
    shapes_on_cpu: int
    fallen: tuple[PlacedNode, ...]
    own_kernels: int = 0

    def require_complete(self, where: str, name_at_most: int = 8) -> None:
        """Raise VerificationError naming the first nodes if any fell back to another provider."""
        if self.fallen:
            named = "".join(f"\n    {node}" for node in self.fallen[:name_at_most])
            more = len(self.fallen) - name_at_most
            raise VerificationError(
                f"{len(self.fallen)} of {sum(self.nodes.values())} nodes do not run on {self.provider}:{named}"
                + (f"\n    and {more} more" if more > 0 else ""),
                where=where,
                remedy="Choose passes that fit the target, or allow it: `evaluate: {allow_fallback: true}`.",
            )


def placement(session: onnxruntime.InferenceSession, model: Path) -> Placement:
    """Return where ONNX Runtime placed `model`'s nodes for this session, whose first provider is the target's.

    `sdflow.runtime.sessions.session` enables the recording. Nodes are counted before later fusions.
    Raises VerificationError if this ONNX Runtime does not record it; `placement_by_profile` always works.
    """
    if not hasattr(session, "get_provider_graph_assignment_info"):
        raise VerificationError("this ONNX Runtime does not report which provider runs a node", where=str(model))
    placed = [
        PlacedNode(node.name, node.op_type, node.domain, part.ep_name)
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
    ]
    return judge(placed, session.get_providers()[0], shape_computation(model))


def placement_by_profile(
    model: Path,
    target: Target,
    inputs: Mapping[str, np.ndarray],
    options: LoadOptions = PLAIN,
    shapes: Shapes | None = None,
) -> Placement:
    """Like `placement`, from the profile of one run in a separate session: the kernels that ran, after all fusions."""
    with tempfile.TemporaryDirectory() as folder:
        session = create_session(model, target, replace(options, profile=Path(folder) / "run"), shapes=shapes)
        session.run(None, dict(inputs))
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        provider = session.get_providers()[0]
    placed = [
        PlacedNode(event["name"].removesuffix("_kernel_time"), event["args"]["op_name"], "", event["args"]["provider"])
        for event in events
        if event["cat"] == "Node" and event["name"].endswith("_kernel_time")
    ]
    return judge(placed, provider, shape_computation(model))


def judge(placed: Iterable[PlacedNode], provider: str, shape_nodes: Collection[str]) -> Placement:
    """Classify a session's nodes. shape_nodes: names of nodes that may run on the CPU with any target."""
    nodes = list(placed)
    others = [node for node in nodes if node.provider != provider]
    shapes = [node for node in others if node.provider == CPU_PROVIDER and node.name and node.name in shape_nodes]
    return Placement(
        provider=provider,
        nodes=dict(sorted(Counter(node.provider for node in nodes).items())),
        shapes_on_cpu=len(shapes),
        fallen=tuple(node for node in others if node not in shapes),
        own_kernels=sum(node.domain == DOMAIN for node in nodes),
    )


def shape_computation(model: Path) -> set[str]:
    """Return the names of a model file's nodes that only compute shapes."""
    return {node.name for node in shape_nodes(load_graph(model).graph)}
