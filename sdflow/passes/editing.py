"""Base class of passes that rewrite a graph; finding nothing to rewrite is an error."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from sdflow.artifact import MODEL_FILE, Facts
from sdflow.errors import PassError
from sdflow.onnx_model.facts import graph_facts
from sdflow.onnx_model.files import store_proto
from sdflow.onnx_model.nodes import import_domain
from sdflow.passes.base import EDITS_GRAPH, Pass, PassConfig, PassInputs
from sdflow.passes.graph_edit import GraphEdit
from sdflow.passes.olive import copy_companions

C = TypeVar("C", bound=PassConfig)


class EditingPass(Pass[C], Generic[C]):
    """A pass that rewrites a graph without reading its weights. Subclasses implement `edit`, and `refusal` for graphs
    that have nothing to rewrite.

    domain: operator set domain that the pass adds to the model if missing; "" for none. Override `domain_for` if it
    depends on an option.
    """

    uses: ClassVar[tuple[str, ...]] = ("onnx", "numpy")
    imports = EDITS_GRAPH
    domain: ClassVar[str] = ""

    @abstractmethod
    def edit(self, edit: GraphEdit, config: C) -> Facts:
        """Rewrite the graph and return the pass's own facts, empty if nothing was done. Unread nodes are removed
        later."""

    @abstractmethod
    def refusal(self, edit: GraphEdit, config: C) -> tuple[str, str]:
        """Return the message and the remedy for a graph that `edit` did not change."""

    def domain_for(self, config: C) -> str:
        """Return the operator set domain to add if missing; "" for none."""
        return self.domain

    def run(self, inputs: PassInputs, out: Path, config: C) -> Facts:
        """Raises PassError if there is nothing to do."""
        import onnx

        source = self.source(inputs)
        model = onnx.load(str(source / MODEL_FILE), load_external_data=False)
        edit = GraphEdit(model.graph, source)
        facts = self.edit(edit, config)
        if not facts:
            message, remedy = self.refusal(edit, config)
            raise PassError(message, where=self.name, remedy=remedy)
        edit.clean()
        if domain := self.domain_for(config):
            import_domain(model, domain)
        store_proto(model, source, out)
        copy_companions(source, out)
        return {**graph_facts(out / MODEL_FILE), **facts}
