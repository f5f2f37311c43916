"""Pipelines that are ready for jobs. Those with LoRAs are created in a thread while the engine continues."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from sdflow.errors import SdflowError
from sdflow.serve.engine.served_pipeline import ServedPipeline
from sdflow.serve.jobs import Job
from sdflow.serve.loras.live_loras import SharedValues
from sdflow.serve.loras.lora_pipelines import LoraPipelines, Made, Wanted

log = logging.getLogger("sdflow.serve")


class ReadyPipelines:
    """A pipeline, without and with LoRAs. One with LoRAs is created at a time. On a GPU the thread only reads files,
    because the device's only stream may be capturing a graph."""

    def __init__(
        self,
        folder: Path,
        base: ServedPipeline,
        cache: Path,
        memory: int,
        values: SharedValues | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """folder: of the pipeline. cache, memory, values: see `LoraPipelines`. changed: called in another thread when
        one is ready."""
        self.base, self._changed = base, changed
        self._loras = LoraPipelines(folder, base, cache, memory, values or SharedValues())
        self.forget = self._loras.forget
        self._in_background = base.base.place.stream is None
        self._pool = ThreadPoolExecutor(1, "loras")
        self._coming: tuple[Job, Future[Made | Wanted]] | None = None

    def prepare(self, job: Job, sizes: Sequence[int], warm: Callable[[ServedPipeline], object]) -> None:
        """Create what the first request with LoRAs would wait for: in the background on a CPU, immediately on a GPU.
        Errors are left to that request. If live sessions fail, for example out of memory, each LoRA gets its own
        sessions.

        job: similar to later ones. sizes: batch sizes. warm: runs a pipeline once, to capture graphs.
        """

        def make() -> ServedPipeline | None:
            live = self._loras.prepare()
            if live is not None and self._in_background:
                for size in sizes:
                    live.prepare(job, size)
            return live

        coming = self._pool.submit(make)
        if not self._in_background and coming.exception() is None and (live := coming.result()) is not None:
            try:
                warm(live)
            except (SdflowError, RuntimeError) as error:  # torch's and ONNX Runtime's
                log.warning("sessions for all LoRAs failed, so each LoRA gets its own: %s", error)
                self._loras.use_files()

    def ready(self, job: Job, *, begin: bool) -> bool:
        """Whether `find` returns without waiting. begin: if not, start creating it, unless another is in progress."""
        if self._loras.get(job.loras) is not None:
            return True
        if self._is_coming(job):
            return self._coming is not None and self._coming[1].done()
        if begin and (self._coming is None or self._coming[1].done()):
            self._begin(job)
        return False

    def find(self, job: Job) -> ServedPipeline:
        """Return the pipeline for a job. Raises UsageError or CheckpointError like `LoraPipelines`."""
        if (found := self._loras.get(job.loras)) is not None:
            return found
        coming = self._coming[1] if self._coming is not None and self._is_coming(job) else self._begin(job)
        self._coming = None
        made = coming.result()
        return self._loras.keep(self._loras.carry_out(made) if isinstance(made, Wanted) else made)

    def rest(self) -> None:
        """Release what only large images need."""
        for each in (self.base, *self._loras.there):
            each.rest()

    def catch_up(self, busy: Callable[[], bool]) -> bool:
        """Create the batch sizes that images lacked. busy: whether to stop. Return whether all are created."""
        return all(each.catch_up(busy) for each in (self.base, *self._loras.there))

    def close(self) -> None:
        """Stop the background thread when the pipeline is unloaded."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _is_coming(self, job: Job) -> bool:
        """Whether the job's pipeline is in progress or was created. One that failed for another job is tried again."""
        if self._coming is None or self._coming[0].loras != job.loras:
            return False
        wanted_by, coming = self._coming
        return wanted_by is job or not coming.done() or coming.exception() is None

    def _begin(self, job: Job) -> Future[Made | Wanted]:
        """Start creating the job's pipeline. A previous one that nobody fetched, because its job was cancelled or ran
        in another lane, is kept for reuse, but not LoRAs that were only read."""
        if self._coming is not None and self._coming[1].exception() is None:
            made = self._coming[1].result()
            if isinstance(made, Made):
                self._loras.keep(made)
        coming = self._pool.submit(self._make, job)
        self._coming = job, coming
        coming.add_done_callback(lambda made: self._changed())
        return coming

    def _make(self, job: Job) -> Made | Wanted:
        wanted = self._loras.read(job.loras)
        if wanted.live and not self._in_background:
            return wanted
        made = self._loras.carry_out(wanted)
        if self._in_background and made.unused:
            made.pipeline.prepare(job)
        return made
