"""The pipelines that draw jobs. One with LoRAs is made in a thread beside the engine, which goes on with what is there."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.serve.jobs import Job
from sdflow.serve.served_pipeline import ServedPipeline

if TYPE_CHECKING:
    from sdflow.serve.lora_pipelines import LoraPipelines, Made


class ReadyPipelines:
    """A pipeline without LoRAs, and with them. One is made at a time."""

    def __init__(self, folder: Path, base: ServedPipeline, cache: Path, memory: int) -> None:
        """folder: of the pipeline. cache, memory: as of `LoraPipelines`."""
        self._folder, self._base, self._cache, self._memory = folder, base, cache, memory
        self._loras: LoraPipelines | None = None
        self._pool = ThreadPoolExecutor(1, "loras")
        self._coming: tuple[Job, Future[Made]] | None = None

    def ready(self, job: Job, *, begin: bool) -> bool:
        """Whether `find` has nothing to wait for. begin: if it has, it is made from now on, unless another still is."""
        if not job.loras or (self._loras is not None and self._loras.get(job.loras) is not None):
            return True
        if self._coming is not None and self._coming[0].loras == job.loras:
            return self._coming[1].done()
        if begin and (self._coming is None or self._coming[1].done()):
            self._keep()
            self._coming = job, self._pool.submit(self._make, job)
        return False

    def find(self, job: Job) -> ServedPipeline:
        """Raises UsageError when LoRAs cannot be put into this pipeline, CheckpointError for one that does not fit."""
        if not job.loras:
            return self._base
        found = None if self._loras is None else self._loras.get(job.loras)
        if found is not None:
            return found
        if self._coming is None or self._coming[0].loras != job.loras:
            self._keep()
            self._coming = job, self._pool.submit(self._make, job)
        (_, coming), self._coming = self._coming, None
        made = coming.result()
        assert self._loras is not None, "what was made is of them"
        return self._loras.keep(made)

    def _keep(self) -> None:
        """What was made for a job that was cancelled since may be wanted by another."""
        if self._coming is not None and self._coming[1].exception() is None:
            assert self._loras is not None, "what was made is of them"
            self._loras.keep(self._coming[1].result())
        self._coming = None

    def _make(self, job: Job) -> Made:
        """In the other thread."""
        if self._loras is None:
            from sdflow.serve.lora_pipelines import LoraPipelines

            self._loras = LoraPipelines(self._folder, self._base, self._cache, self._memory)
        made = self._loras.make(job.loras)
        made.pipeline.prepare(job)
        return made
