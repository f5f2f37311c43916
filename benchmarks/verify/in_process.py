"""Run `sdflow verify` in this process, which imports its modules only once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sdflow.config.workflow import VerifySpec
from sdflow.errors import UsageError, VerificationError
from sdflow.processes.workers import WorkerResult
from sdflow.store import Cache
from sdflow.verify import Verification, subject_of_folder, verify
from sdflow.verify.artifact.exact import prove
from sdflow.verify.artifact.judge import judge
from sdflow.verify.artifact.judge_request import JudgeRequest
from sdflow.verify.as_json import from_json
from sdflow.verify.finding import Finding, errors
from sdflow.verify.folder import FolderRequest, hold_folder
from sdflow.verify.reference.cases import read_cases
from sdflow.verify.worker import work


class Found(Exception):
    """A part of the verification that has found enough; the rest is not done."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__()
        self.problems = problems


class Asked(Exception):
    """What a verification would have done is known."""


@dataclass(frozen=True)
class Suspicion:
    """Where a fault may be: what is not looked at in vain comes first, and the first part that finds something ends the
    verification. counts: whether what is found counts. submodel: whose folder differs from one that passes. graph: whether its
    graph or its weights do."""

    counts: Callable[[str], bool]
    submodel: str | None = None
    graph: bool = False


class Here:
    """Stands for the group of processes: the work is done in this one.

    suspicion: given, the verification ends with Found at the first part that finds something that counts: what lies beside the
    graphs (last, where a graph differs), the proof of the submodel that differs, all that is said of that submodel alone; then
    the whole. Each is a part of the whole. ask_only: it ends with Asked before any work is done.
    """

    def __init__(self, suspicion: Suspicion | None = None, *, ask_only: bool = False) -> None:
        self.suspicion, self.ask_only = suspicion, ask_only
        self.asked: JudgeRequest | None = None
        """Of the pipeline; of a base with its refiner, the base."""

    def check(self) -> None:
        pass

    def run(self, module: str, request: Mapping[str, Any], **options: Any) -> WorkerResult:
        if "judge" in request and self.asked is None:
            self.asked = from_json(JudgeRequest, request["judge"])
            if self.ask_only:
                raise Asked
            if self.suspicion is not None and request["reference"] is None:
                self._in_parts(self.suspicion, from_json(FolderRequest, request["folder"]), self.asked)
        return WorkerResult(work(request, lambda phrase: None), 0.0, 0)

    def _in_parts(self, suspicion: Suspicion, folder: FolderRequest, asked: JudgeRequest) -> None:
        if not suspicion.graph:
            self._end_at(suspicion, _words(hold_folder(folder, lambda phrase: None).findings))
        if (name := suspicion.submodel) not in asked.submodels:
            return
        assert name is not None
        checks = [each for each in asked.recipes if each.submodel == name]
        for check in checks:
            with suppress(VerificationError):  # as in the whole: it is said where the graph is opened
                proof = prove(check, read_cases(asked.reference, name), threads=asked.threads)
                self._end_at(suspicion, [*_words(proof.findings), *(f"{name}: {what}" for what, _ in proof.problems)])
        modules = [each for each in asked.modules if each.submodel == name]
        with suppress(UsageError):  # as in the whole: what lies beside the graphs is then not what it should be
            found = judge(replace(asked, submodels=[name], recipes=checks, modules=modules), lambda phrase: None)
            self._end_at(suspicion, [f"{where}: {what}" for where, what, _ in found.problems])

    def _end_at(self, suspicion: Suspicion, problems: list[str]) -> None:
        if counted := [each for each in problems if suspicion.counts(each)]:
            raise Found(counted)


def _words(findings: Sequence[Finding]) -> list[str]:
    return [f"{each.submodel} {each.node}: {each.what}" for each in errors(findings)]


def verified(
    folder: Path,
    spec: VerifySpec,
    cache: Cache,
    here: Here,
    *,
    submodels: list[str] | None = None,
    fresh: bool = False,
    threads: int = 1,
) -> Verification:
    """What `sdflow verify` gives. Raises what it raises."""
    subject = subject_of_folder(folder, cache)
    return verify(subject, spec, cache, submodels=submodels, fresh=fresh, threads=threads, group=here).result  # type: ignore[arg-type]
