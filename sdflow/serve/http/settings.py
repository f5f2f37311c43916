"""What a server was started with."""

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
    """Of a server. additions: None: its pipelines stay as they are, as on a cluster. root_path: the prefix of its paths behind a
    proxy. traces: the collector that they are sent to."""

    models: Models
    worker: WorkerOptions
    access: Access
    limits: Limits
    loras: Loras
    log_prompts: bool = False
    wildcards: Wildcards | None = None
    log: Callable[..., None] = log_line
    additions: Additions | None = NO_ADDITIONS
    root_path: str = ""
    traces: str | None = None
