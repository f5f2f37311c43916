"""A verification in this process, whose imports are made once; all else is `sdflow verify`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sdflow.config.workflow import VerifySpec
from sdflow.errors import VerificationError
from sdflow.store import Cache
from sdflow.verify import Verification, subject_of_folder, verify
from sdflow.verify.cases import read_cases
from sdflow.verify.exact import prove
from sdflow.verify.finding import Finding, errors
from sdflow.verify.folder import FolderRequest, hold_folder
from sdflow.verify.judge_request import JudgeRequest
from sdflow.verify.worker import work
from sdflow.workers import WorkerResult


class Found(Exception):
    """A part of the verification that has found enough; the rest is not done."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__()
        self.problems = problems


class Here:
    """Stands for the group of processes: the work is done in this one.

    counts: whether what is found counts. Given, the verification ends with Found at the first part of it that finds
    something that counts: the folder, then the proof of each submodel, then the whole of it.
    """

    def __init__(self, counts: Callable[[str], bool] | None = None) -> None:
        self.counts = counts
        self.asked: JudgeRequest | None = None

    def check(self) -> None:
        pass

    def run(self, module: str, request: Mapping[str, Any], **options: Any) -> WorkerResult:
        if "judge" not in request:  # the image of a base and its refiner
            return WorkerResult(work(request, lambda phrase: None), 0.0, 0)
        self.asked = JudgeRequest.from_json(request["judge"])
        if self.counts is not None and request["reference"] is None:
            self._in_parts(request, self.asked)
        return WorkerResult(work(request, lambda phrase: None), 0.0, 0)

    def _in_parts(self, request: Mapping[str, Any], asked: JudgeRequest) -> None:
        self._end_at(_words(hold_folder(FolderRequest.from_json(request["folder"]), lambda phrase: None).findings))
        for check in asked.recipes:
            with suppress(VerificationError):  # as in the whole: it is said where the graph is opened
                proof = prove(check, read_cases(asked.reference, check.submodel), threads=asked.threads)
                self._end_at([*_words(proof.findings), *(f"{check.submodel}: {what}" for what, _ in proof.problems)])

    def _end_at(self, problems: list[str]) -> None:
        if counted := [each for each in problems if self.counts is None or self.counts(each)]:
            raise Found(counted)


def _words(findings: Sequence[Finding]) -> list[str]:
    return [f"{each.submodel} {each.node}: {each.what}" for each in errors([*findings])]


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
