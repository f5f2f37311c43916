"""Settings of a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sdflow.prompts.wildcards import Wildcards
from sdflow.serve.http.loras import Loras
from sdflow.serve.http.models import NO_ADDITIONS, Additions, Models
from sdflow.serve.jobs import WorkerOptions
from sdflow.serve.keys import Access
from sdflow.serve.limits import Limits
from sdflow.serve.log import log_line


@dataclass(frozen=True)
class Settings:
    models: Models
    worker: WorkerOptions
    access: Access
    limits: Limits
    loras: Loras
    log_prompts: bool = False
    wildcards: Wildcards | None = None
    log: Callable[..., None] = log_line
    additions: Additions | None = NO_ADDITIONS  # None: pipelines cannot change, as on a cluster
    root_path: str = ""  # prefix of the server's paths behind a proxy
    traces: str | None = None  # URL of an OpenTelemetry collector
