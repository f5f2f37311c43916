"""`sdflow serve`: serve built pipelines."""

from __future__ import annotations

from sdflow.cli import serve_options as options
from sdflow.cli.needs import needs
from sdflow.cli.opened import cache_folder


@needs("DRAWS", "SERVES")
def serve(
    pipeline: options.Folders,
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    api_key_file: options.KeyFile = None,
    admin_key_file: options.AdminKeyFile = None,
    no_auth: options.NoAuth = False,
    allowed_host: options.AllowedHosts = None,
    forwarded_allow_ips: options.ForwardedAllowIps = "127.0.0.1",
    root_path: options.RootPath = "",
    ssl_certfile: options.TlsCertificate = None,
    ssl_keyfile: options.TlsKey = None,
    drain_timeout: options.DrainTimeout = 60,
    alias: options.Alias = None,
    default: options.Default = None,
    pipeline_folder: options.PipelineFolder = None,
    pipeline_memory: options.PipelineMemory = None,
    loras: options.Loras = None,
    embedding_folder: options.EmbeddingFolder = None,
    wildcards: options.Wildcards = None,
    lora_memory: options.LoraMemory = 8.0,
    cache: options.Cache = None,
    require_verified: options.RequireVerified = False,
    cors_origin: options.CorsOrigin = None,
    max_queue: options.MaxQueue = 64,
    deadline: options.Deadline = 600,
    stall: options.Stall = None,
    max_images: options.MaxImages = 10,
    max_steps: options.MaxSteps = 150,
    max_pixels: options.MaxPixels = None,
    max_chunks: options.MaxChunks = 16,
    max_cost: options.MaxCost = None,
    max_body: options.MaxBody = 32 << 20,
    max_connections: options.MaxConnections = 512,
    max_uploads: options.MaxUploads = 32,
    max_upload_gb: options.MaxUploadGb = 8.0,
    batch_sizes: options.BatchSizes = None,
    threads: options.Threads = None,
    lanes: options.Lanes = 1,
    checker: options.Checker = True,
    check: options.Check = True,
    log_prompts: options.LogPrompts = False,
    traces: options.Traces = None,
    open_page: options.OpenPage = False,
    on: options.On = None,
    replicas: options.Replicas = None,
    gpus: options.Gpus = None,
    queue: options.Queue = None,
    take_over: options.TakeOver = False,
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
            f"{text!r} is not a list of batch sizes",
            where="--batch-sizes",
            remedy="Use numbers from 1 to 64, such as --batch-sizes 1,2,4.",
        )
    return tuple(sorted({1, *map(int, text.split(","))}))
