"""`sdflow serve`: serve built pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sdflow.cli.needs import needs
from sdflow.cli.opened import cache_folder

Folders = Annotated[
    list[Path], typer.Argument(help="Pipeline folders; requests select one by its name.", metavar="PIPELINE...")
]
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every interface.")]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        help="File of API keys, one on each line; requests must send one of them. Read again when it changes.",
        metavar="FILE",
    ),
]
AdminKeyFile = Annotated[
    Path | None,
    typer.Option(
        help="File of keys that may also upload and delete LoRAs, add and remove pipelines, and stop requests of others. "
        "Default: every key may change LoRAs and pipelines.",
        metavar="FILE",
    ),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option("--allowed-host", help="Name of this server in Host headers. Repeatable.", metavar="NAME"),
]
NoAuth = Annotated[bool, typer.Option("--no-auth", help="Allow addresses other than loopback without an API key.")]
RequireVerified = Annotated[
    bool, typer.Option("--require-verified", help="Refuse pipelines that were not verified when built.")
]


@needs("DRAWS", "SERVES")
def serve(
    pipeline: Folders,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one and logs it.")] = 8000,
    api_key_file: KeyFile = None,
    admin_key_file: AdminKeyFile = None,
    no_auth: NoAuth = False,
    allowed_host: AllowedHosts = None,
    forwarded_allow_ips: Annotated[
        str,
        typer.Option(
            help="Addresses of proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted, separated by commas.",
            metavar="IPS",
        ),
    ] = "127.0.0.1",
    root_path: Annotated[
        str, typer.Option(help="Path prefix that a proxy strips, such as /images.", metavar="PATH", show_default=False)
    ] = "",
    ssl_certfile: Annotated[
        Path | None, typer.Option(help="TLS certificate (PEM): serve HTTPS.", metavar="FILE")
    ] = None,
    ssl_keyfile: Annotated[
        Path | None, typer.Option(help="Private key of --ssl-certfile (PEM).", metavar="FILE")
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests may take after SIGTERM.")
    ] = 60,
    alias: Annotated[
        list[str] | None,
        typer.Option(help="Another name of a pipeline, such as dall-e-3=sdxl. Repeatable.", metavar="ALIAS=PIPELINE"),
    ] = None,
    default: Annotated[
        str | None,
        typer.Option(
            help="Pipeline for requests with no model, or an unknown one. Without it, requests with no model use the "
            "first pipeline, and unknown names are errors.",
            metavar="PIPELINE",
        ),
    ] = None,
    pipeline_folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder of pipeline folders that can be added while the server runs (POST /v1/models).", metavar="DIR"
        ),
    ] = None,
    pipeline_memory: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Memory in GB for loaded pipelines, by file size; others are loaded on request, and the least recently used "
            "are unloaded. Default: all stay loaded.",
        ),
    ] = None,
    loras: Annotated[
        Path | None, typer.Option(help="Folder of LoRAs (.safetensors) that requests may use.", metavar="DIR")
    ] = None,
    embedding_folder: Annotated[
        Path | None,
        typer.Option(
            "--embeddings", help="Folder of textual inversion files (.safetensors) that prompts can use.", metavar="DIR"
        ),
    ] = None,
    wildcards: Annotated[
        Path | None,
        typer.Option(help="Folder of text files: __NAME__ in a prompt becomes a line of NAME.txt.", metavar="DIR"),
    ] = None,
    lora_memory: Annotated[
        float, typer.Option(min=0, help="Memory in GB for LoRA sessions; the most recently used stay loaded.")
    ] = 8.0,
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache",
            envvar="SDFLOW_CACHE",
            help="Cache folder that the pipelines were built with. Default: the user's cache.",
        ),
    ] = None,
    require_verified: RequireVerified = False,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Allow requests from pages of this origin (CORS). Repeatable.", metavar="URL"),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Maximum number of images running or queued; further requests get 429.")
    ] = 64,
    deadline: Annotated[
        float, typer.Option(min=0.1, help="Timeout of a request in seconds, including queueing.")
    ] = 600,
    stall: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Seconds without progress before the worker is restarted. Default: ten times as long as loading and "
            "the first image took, at least 60.",
        ),
    ] = None,
    max_images: Annotated[int, typer.Option(min=1, help="Maximum number of images per request.")] = 10,
    max_steps: Annotated[int, typer.Option(min=1, help="Maximum number of steps per image.")] = 150,
    max_pixels: Annotated[
        int | None,
        typer.Option(
            min=64,
            help="Maximum number of pixels per image. Default: 16 times the model's native size, or what fits in memory as "
            "measured at startup (shown in the log and /v1/models); 4194304 for uploaded images.",
        ),
    ] = None,
    max_chunks: Annotated[
        int, typer.Option(min=1, help="Maximum number of chunks of 75 tokens in a prompt; BREAK begins a new one.")
    ] = 16,
    max_cost: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Maximum cost of a request: images x steps x megapixels x sections of the prompt between BREAKs. "
            "Default: unlimited.",
        ),
    ] = None,
    max_body: Annotated[int, typer.Option(min=1024, help="Maximum number of bytes per request.")] = 32 << 20,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Maximum number of open connections; further ones get 503.")
    ] = 512,
    max_uploads: Annotated[
        int,
        typer.Option(min=0, help="Maximum number of uploaded LoRAs; each is kept until deleted or the server stops."),
    ] = 32,
    max_upload_gb: Annotated[float, typer.Option(min=0, help="Disk space for uploaded LoRAs in GB.")] = 8.0,
    batch_sizes: Annotated[
        str | None, typer.Option(help="Batch sizes of the denoiser. Default: measured at startup.", metavar="1,2,4")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    lanes: Annotated[
        int,
        typer.Option(min=1, max=64, help="Batches to run in parallel on a CPU, each with its share of the threads."),
    ] = 1,
    checker: Annotated[
        bool,
        typer.Option(
            "--safety-checker/--no-safety-checker",
            help="Black out images that the safety checker flags, if there is one.",
        ),
    ] = True,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Verify the pipelines' files against their digests first.")
    ] = True,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Include prompts in the log.")] = False,
    traces: Annotated[
        str | None,
        typer.Option(
            help="Send OpenTelemetry traces to this collector (OTLP/HTTP), such as http://localhost:4318.",
            metavar="URL",
        ),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the web page in the browser.")] = False,
    on: Annotated[
        str | None,
        typer.Option("--on", help="Serve on Ray: the cluster of this machine or of RAY_ADDRESS.", metavar="ray"),
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(help="With --on: number of replicas, or a range to scale in. Default: 1.", metavar="MIN:MAX"),
    ] = None,
    gpus: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="With --on: GPUs per replica. A fraction, for the target cuda, also limits its device memory. Default: 1 if a "
            "pipeline runs on an NVIDIA or AMD GPU, else 0.",
        ),
    ] = None,
    queue: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --on: queued images per replica above which another replica starts. Default: 4."
        ),
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="With --on: replace the sdflow deployment already running there.")
    ] = False,
) -> None:
    """Serve pipelines over HTTP.

    A web page at /, OpenAI's images API at /v1, metrics at /metrics. Concurrent requests are batched.
    """
    from sdflow.prompts.wildcards import Wildcards
    from sdflow.serve.http.loras import Loras
    from sdflow.serve.http.models import Additions, Models, read_aliases
    from sdflow.serve.http.served_model import read_all_served
    from sdflow.serve.http.server import Listening, access_of, serve
    from sdflow.serve.http.settings import Settings
    from sdflow.serve.jobs import WorkerOptions
    from sdflow.serve.limits import Limits
    from sdflow.serve.loras.lora_structures import LoraFit
    from sdflow.serve.on_ray.server import serve_on_ray
    from sdflow.serve.on_ray.spread import read_spread, with_gpus
    from sdflow.sources.embedding import embeddings_in

    tls = ssl_certfile is not None or ssl_keyfile is not None
    spread = read_spread(on, port, replicas, gpus, queue, take_over, drain=drain_timeout, tls=tls)
    if spread is not None:
        threads = threads or 1  # the number of cores requested from Ray
    limits = Limits(
        images=max_images,
        pixels=max_pixels,
        steps=max_steps,
        body=max_body,
        queue=max_queue,
        seconds=deadline,
        uploads=max_uploads,
        upload_bytes=int(max_upload_gb * 1e9),
        connections=max_connections,
        chunks=max_chunks,
        cost=max_cost,
    )
    served = read_all_served(pipeline, require_verified=require_verified, check=check)
    models = Models(served, read_aliases(alias or []), default)
    if spread is not None:
        spread = with_gpus(spread, gpus, [model.manifest for model in served.values()])
    store = cache_folder(cache).absolute()
    folders = {name: model.folder.absolute() for name, model in models.items()}
    settings = Settings(
        models,
        WorkerOptions(
            folders,
            read_sizes(batch_sizes),
            threads,
            checker,
            store,
            int(lora_memory * 1e9),
            loras=loras is not None,
            lanes=lanes,
            deadline=deadline,
            stall=stall,
            embeddings=None if embedding_folder is None else embedding_folder.absolute(),
            memory=None if pipeline_memory is None else int(pipeline_memory * 1e9),
            chunks=max_chunks,
        ),
        access_of(
            host,
            api_key_file,
            cors_origin or (),
            no_auth=no_auth,
            admin_key_file=admin_key_file,
            hosts=allowed_host or (),
        ),
        limits,
        Loras(
            loras,
            store / "v1" if on is not None and (store / "v1").is_dir() else None,
            LoraFit(models, store).require,
            limits,
        ),
        log_prompts,
        None if wildcards is None else Wildcards(wildcards),
        additions=Additions(pipeline_folder, require_verified, check) if spread is None else None,
        root_path=root_path.rstrip("/"),
        traces=traces,
    )
    if embedding_folder is not None:
        embeddings_in(embedding_folder)  # report an invalid one before loading anything

    for name, model in models.items():
        if model.left_aside:
            words = f"served without its workflow's approximations ({model.left_aside.spelled()})"
            settings.log("exact", pipeline=name, what=words)

    def started(url: str, port: int) -> None:
        if open_page:
            _open(url)

    if spread is None:
        where = Listening(host, port, forwarded_allow_ips, drain_timeout, ssl_certfile, ssl_keyfile)
        serve(settings, where, started)
    else:
        serve_on_ray(settings, host, port, spread, started)


def _open(url: str) -> None:
    """Open the page in a browser; without one, print its address."""
    import webbrowser

    from sdflow.cli.quiet import say

    if not webbrowser.open(url):
        say(f"No browser found. The page is at {url}")


def read_sizes(text: str | None) -> tuple[int, ...] | None:
    """Parse batch sizes; 1 is always included. Raises UsageError."""
    from sdflow.errors import UsageError

    if text is None:
        return None
    if not all(part.isdigit() and 0 < int(part) <= 64 for part in text.split(",")):
        raise UsageError(
            f"{text!r} is not a list of sizes",
            where="--batch-sizes",
            remedy="Use numbers from 1 to 64, such as --batch-sizes 1,2,4.",
        )
    return tuple(sorted({1, *map(int, text.split(","))}))
