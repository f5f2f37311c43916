"""The denoiser's graph as it reads reference images is verified, and a fault in how it is extended or fed is found."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from converted import Converted

from sdflow.families import FAMILIES
from sdflow.models.ports import Sizes
from sdflow.sources import PlainDigests, open_checkpoint
from sdflow.verify.artifact import with_references
from sdflow.verify.artifact.judge_request import JudgeRequest
from sdflow.verify.artifact.with_references import judge_references
from sdflow.verify.reference.cases import Case, Cases
from sdflow.verify.reference.streamed import Reading
from sdflow.verify.reference.torch_module import TorchModule

NAME = "transformer"


@pytest.fixture(scope="module")
def judged(converted: Converted, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What is found of the tiny FLUX.2's transformer, whenever it is called."""
    checkpoint = open_checkpoint("synthetic:flux2-tiny", digests=PlainDigests(), download=False)
    load = checkpoint.submodels[NAME].load
    folder = tmp_path_factory.mktemp("references")
    (folder / NAME).symlink_to(converted(checkpoint, (NAME,))[NAME].path, target_is_directory=True)
    model = checkpoint.family.part(NAME).model
    cases = Cases()
    for name, group, batch in (("step 1", "trajectory", 1), ("step 2", "trajectory", 1), ("shape", "shape", 2)):
        sizes = Sizes(batch=batch, height=6, width=4, vae_scale=1)
        cases.add(Case(name, group), model.dummy(load["config"], sizes, seed=len(cases.cases)))
    module = TorchModule(NAME, load, [], load["config"])

    def found(level: str, most: int | None = None) -> Any:
        request = JudgeRequest("flux2", folder, "tiny", "cpu", level, [NAME], Path(), folder)
        request = replace(request, most={} if most is None else {NAME: most})
        return judge_references(request, FAMILIES["flux2"], "float32", cases, replace(module, most=most))

    return found


@pytest.mark.parametrize(("level", "count"), [("quick", 1), ("full", 3)])
def test_the_extended_graph_is_pytorchs_with_references(judged: Any, level: str, count: int) -> None:
    problems, covered = judged(level)
    assert problems == []
    assert covered == (f"transformer with reference images: {count} cases, latents of 5x7, 8x3",)


def test_a_module_in_pieces_is_read_once_and_gives_the_same(judged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cases, in float32 and in 16 bits, share one pass over the weights."""
    found: list[Any] = []
    read: Counter[str] = Counter()
    judge, part = with_references.judge_outputs, Reading.part

    def seen(precision: str, cases: Any, stated: float | None) -> Any:
        found.append(cases)
        return judge(precision, cases, stated)

    def counted(self: Reading, names: Any, *, keep: bool) -> Any:
        inner = self.read
        self.read = lambda name: (read.update([name]), inner(name))[1]
        try:
            return part(self, names, keep=keep)
        finally:
            self.read = inner

    monkeypatch.setattr(with_references, "judge_outputs", seen)
    monkeypatch.setattr(Reading, "part", counted)
    for most in (None, 2**17):
        judged("full", most)
    assert found[0] == found[1]
    assert read and {*read.values()} == {1}


@pytest.mark.parametrize(("what", "value"), [("_TIME_APART", 11), ("_places", None)], ids=["time", "rows and columns"])
def test_references_at_wrong_places_are_found(
    what: str, value: int | None, judged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdflow.families.flux2 import references

    right = references._places
    wrong = value if value is not None else lambda number, rows, columns: right(number, columns, rows)
    monkeypatch.setattr(references, what, wrong)
    ((problem, _),), _ = judged("quick")
    assert problem.startswith("with reference images, out_sample is")


def test_an_extension_that_cuts_the_wrong_tokens_off_is_found(judged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sdflow.families.flux2.references import Flux2References

    extend = Flux2References.extend

    def wrong(self: Flux2References, graph: Any) -> None:
        extend(self, graph)
        (join,) = (node for node in graph.graph.node if node.name == "references/Concat")
        join.input[:] = join.input[::-1]

    monkeypatch.setattr(Flux2References, "extend", wrong)
    ((problem, _),), _ = judged("quick")
    assert problem.startswith("with reference images, out_sample is")
