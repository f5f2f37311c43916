"""Options of `sdflow serve`, in the order of its arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Folders = Annotated[
    list[Path], typer.Argument(help="Pipeline folders; requests select one by its name.", metavar="PIPELINE...")
]
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every interface.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one and logs it.")]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        help="File of API keys, one per line; requests must send one of them. The file is read again when it changes.",
        metavar="FILE",
    ),
]
AdminKeyFile = Annotated[
    Path | None,
    typer.Option(
        help="File of keys that may also upload and delete LoRAs, add and remove pipelines, and stop others' requests. "
        "Default: every key may change LoRAs and pipelines.",
        metavar="FILE",
    ),
]
NoAuth = Annotated[bool, typer.Option("--no-auth", help="Allow addresses other than loopback without an API key.")]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-host",
        help="Name of this server in Host headers, besides localhost. Repeatable. Default: on an address other than "
        "loopback, any name.",
        metavar="NAME",
    ),
]
ForwardedAllowIps = Annotated[
    str,
    typer.Option(
        help="Addresses of proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted, separated by commas.",
        metavar="IPS",
    ),
]
RootPath = Annotated[
    str, typer.Option(help="Path prefix that a proxy strips, such as /images.", metavar="PATH", show_default=False)
]
TlsCertificate = Annotated[Path | None, typer.Option(help="TLS certificate (PEM): serve HTTPS.", metavar="FILE")]
TlsKey = Annotated[Path | None, typer.Option(help="Private key of --ssl-certfile (PEM).", metavar="FILE")]
DrainTimeout = Annotated[float, typer.Option(min=0, help="Seconds that accepted requests may take after SIGTERM.")]
Alias = Annotated[
    list[str] | None,
    typer.Option(help="Another name of a pipeline, such as dall-e-3=sdxl. Repeatable.", metavar="ALIAS=PIPELINE"),
]
Default = Annotated[
    str | None,
    typer.Option(
        help="Pipeline for requests that name no model, or an unknown one. Default: the first pipeline for requests "
        "that name none; unknown names are errors.",
        metavar="PIPELINE",
    ),
]
PipelineFolder = Annotated[
    Path | None,
    typer.Option(
        help="Folder of pipeline folders that can be added while the server runs (POST /v1/models).", metavar="DIR"
    ),
]
PipelineMemory = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Memory in GB for loaded pipelines, by file size; others are loaded on request, and the least recently used "
        "are unloaded. Default: all stay loaded.",
    ),
]
Loras = Annotated[
    Path | None, typer.Option(help="Folder of LoRAs (.safetensors) that requests may use.", metavar="DIR")
]
EmbeddingFolder = Annotated[
    Path | None,
    typer.Option(
        "--embeddings", help="Folder of textual inversion files (.safetensors) that prompts can use.", metavar="DIR"
    ),
]
Wildcards = Annotated[
    Path | None,
    typer.Option(help="Folder of text files: __NAME__ in a prompt becomes a line of NAME.txt.", metavar="DIR"),
]
LoraMemory = Annotated[
    float,
    typer.Option(min=0, help="Memory in GB per pipeline for weights with LoRAs; the most recently used stay loaded."),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        envvar="SDFLOW_CACHE",
        help="Cache folder that the pipelines were built with. Default: the user's cache.",
    ),
]
RequireVerified = Annotated[
    bool, typer.Option("--require-verified", help="Refuse pipelines that were not verified when built.")
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(help="Allow requests from pages of this origin (CORS). Repeatable.", metavar="URL"),
]
MaxQueue = Annotated[
    int, typer.Option(min=1, help="Maximum number of images running or queued; further requests get 429.")
]
Deadline = Annotated[float, typer.Option(min=0.1, help="Timeout of a request in seconds, including queueing.")]
Stall = Annotated[
    float | None,
    typer.Option(
        min=1,
        help="Seconds without progress before the worker is restarted. Default: ten times as long as loading and "
        "the first image took, from 60 to --deadline; --deadline for targets that compile for each size; more for images "
        "larger than the model's own size.",
    ),
]
MaxImages = Annotated[int, typer.Option(min=1, help="Maximum number of images per request.")]
MaxSteps = Annotated[int, typer.Option(min=1, help="Maximum number of steps per image.")]
MaxPixels = Annotated[
    int | None,
    typer.Option(
        min=64,
        help="Maximum number of pixels per image. Default: 16 times the model's native size, or what fits in memory as "
        "measured at startup (shown in the log and /v1/models); 4194304 for uploaded images.",
    ),
]
MaxChunks = Annotated[
    int, typer.Option(min=1, help="Maximum number of chunks of 75 tokens in a prompt; BREAK begins a new one.")
]
MaxCost = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Maximum cost of a request: images x steps x megapixels x sections of the prompt between BREAKs. "
        "Default: unlimited.",
    ),
]
MaxBody = Annotated[int, typer.Option(min=1024, help="Maximum number of bytes per request.")]
MaxConnections = Annotated[int, typer.Option(min=1, help="Maximum number of open connections; further ones get 503.")]
MaxUploads = Annotated[
    int,
    typer.Option(min=0, help="Maximum number of uploaded LoRAs; each is kept until deleted or the server stops."),
]
MaxUploadGb = Annotated[float, typer.Option(min=0, help="Disk space for uploaded LoRAs in GB.")]
BatchSizes = Annotated[
    str | None, typer.Option(help="Batch sizes of the denoiser. Default: measured at startup.", metavar="1,2,4")
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads. With --on: per replica; default: 1.")]
Lanes = Annotated[
    int,
    typer.Option(min=1, max=64, help="Batches to run in parallel on a CPU, each with its share of the threads."),
]
Checker = Annotated[
    bool,
    typer.Option(
        "--safety-checker/--no-safety-checker",
        help="Black out images that the safety checker flags, if there is one.",
    ),
]
Check = Annotated[
    bool, typer.Option("--check/--no-check", help="Verify the pipelines' files against their digests first.")
]
LogPrompts = Annotated[bool, typer.Option("--log-prompts", help="Include prompts in the log.")]
Traces = Annotated[
    str | None,
    typer.Option(
        help="Send OpenTelemetry traces to this collector (OTLP/HTTP), such as http://localhost:4318.",
        metavar="URL",
    ),
]
OpenPage = Annotated[bool, typer.Option("--open", help="Open the web page in the browser.")]
On = Annotated[
    str | None,
    typer.Option("--on", help="Serve on Ray: the cluster of this machine or of RAY_ADDRESS.", metavar="ray"),
]
Replicas = Annotated[
    str | None,
    typer.Option(help="With --on: number of replicas, or a range to scale in. Default: 1.", metavar="MIN:MAX"),
]
Gpus = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="With --on: GPUs per replica. A fraction, for the target cuda, also limits its device memory. Default: 1 if a "
        "pipeline runs on an NVIDIA or AMD GPU, else 0.",
    ),
]
Queue = Annotated[
    int | None,
    typer.Option(min=1, help="With --on: queued images per replica above which another replica starts. Default: 4."),
]
TakeOver = Annotated[
    bool, typer.Option("--take-over", help="With --on: replace the sdflow deployment already running there.")
]
