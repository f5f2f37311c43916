"""Train the sample pipeline from nothing: its VAE, its text encoder and UNet, a refinement of both, then two LoRAs.

    python samples/train.py --out samples

Every stage writes its result into the folder and reads the earlier stages' from there: `--stages outline` alone is fine.
Settings are in samples/settings.json; the images are drawn here (sdflow/samples/scene.py), nothing is downloaded.
"""

import argparse
import copy
import json
import random
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from architecture import make_scheduler, make_text_encoder, make_tokenizer, make_unet, make_vae
from autoencoder import trained
from denoising import Denoising, encode
from diffusers import AutoencoderKL, StableDiffusionPipeline
from lora import add_lora, freeze, lora_parameters, save_diffusers, save_kohya
from optimize import Ema, Log, optimizer_steps
from torch import Tensor, nn
from training_images import images, training_scenes

from sdflow.samples.prompts import caption
from sdflow.samples.scene import Scene, Style

STYLES = {
    "plain": Style(),
    "stripes": Style(stripes=True),
    "outline": Style(outline=True),
    "both": Style(stripes=True, outline=True),
}
Settings = dict[str, Any]
STAGES = {  # each stage, and the images that it needs
    "vae": ("plain", "stripes", "outline", "both"),
    "base": ("plain",),
    "refine": ("plain",),
    "stripes": ("stripes",),
    "outline": ("outline", "both"),
}


def maybe_compiled(module: nn.Module, settings: Settings) -> nn.Module:
    """The module under torch.compile where the settings ask for it."""
    return torch.compile(module) if settings["compile"] else module  # type: ignore[return-value]


def train_vae(settings: Settings, pools: dict[str, Tensor], out: Path, log: Log, device: torch.device) -> None:
    """Train the autoencoder on all styles; its scaling factor makes the plain images' latents unit variance."""
    chosen = settings["vae"]
    vae = make_vae().to(device, memory_format=torch.channels_last)
    names, count = list(pools), chosen["batch"] // len(pools)

    def batch() -> Tensor:
        return torch.cat([pools[n][torch.randint(len(pools[n]), (count,), device=device)] for n in names])

    average = trained(vae, chosen, partial(maybe_compiled, settings=settings), batch, log)
    sample = encode(average, pools["plain"][:4096], 1.0)
    average.register_to_config(scaling_factor=round(1.0 / sample.std().item(), 5))
    average.half().to(memory_format=torch.contiguous_format).save_pretrained(out / "shapes" / "vae")


def train_base(
    settings: Settings, plain: Tensor, scenes: list[Scene], out: Path, log: Log, device: torch.device
) -> None:
    """Train text encoder and UNet together on plain images and write the whole pipeline's folder."""
    folder = out / "shapes"
    rng = random.Random(settings["seed"])
    texts = [caption(scene, rng) for scene in scenes]
    vae = AutoencoderKL.from_pretrained(folder / "vae", torch_dtype=torch.float32)
    tokenizer = make_tokenizer(texts, folder / "tokenizer")
    pipeline = StableDiffusionPipeline(
        vae, make_text_encoder(tokenizer), tokenizer, make_unet(), make_scheduler(), None, None,
        requires_safety_checker=False,
    ).to(device)  # fmt: skip
    fit(pipeline, "base", settings, plain, texts, folder, log)


def train_refine(
    settings: Settings, plain: Tensor, scenes: list[Scene], out: Path, log: Log, device: torch.device
) -> None:
    """Train text encoder and UNet on, with the weight on the noisiest steps, where the prompt decides what is shown."""
    rng = random.Random(settings["seed"] + 1)
    pipeline = StableDiffusionPipeline.from_pretrained(out / "shapes", torch_dtype=torch.float32).to(device)
    fit(pipeline, "refine", settings, plain, [caption(scene, rng) for scene in scenes], out / "shapes", log)


def fit(
    pipeline: StableDiffusionPipeline,
    stage: str,
    settings: Settings,
    plain: Tensor,
    texts: list[str],
    folder: Path,
    log: Log,
) -> None:
    """Train the pipeline's text encoder and UNet by the stage's settings; their moving average goes to the folder."""
    chosen, vae = settings[stage], pipeline.vae
    plain, texts = plain[: chosen["images"]], texts[: chosen["images"]]
    unet, text_encoder = pipeline.unet, pipeline.text_encoder
    unet.to(memory_format=torch.channels_last)
    for module in (unet, text_encoder):
        module.train().requires_grad_(True)
    ema = Ema([unet, text_encoder], chosen["ema_decay"])
    task = Denoising(pipeline, maybe_compiled(unet, settings), maybe_compiled(text_encoder, settings), chosen)
    latents = encode(vae, plain, vae.config.scaling_factor)
    captions = torch.cat([task.tokens(texts[i : i + 4096]) for i in range(0, len(texts), 4096)])

    def save() -> None:
        pipeline.register_modules(
            unet=copy.deepcopy(ema.modules[0]).to(torch.float16, memory_format=torch.contiguous_format),
            text_encoder=copy.deepcopy(ema.modules[1]).half(),
            vae=copy.deepcopy(vae).half(),
        )
        pipeline.save_pretrained(folder)
        forget_path(folder)

    def stepped() -> Iterator[Tensor]:
        parameters = [*unet.parameters(), *text_encoder.parameters()]
        steps = optimizer_steps(parameters, chosen["steps"], chosen["learning_rate"], task.losses(latents, captions))
        for step, loss in enumerate(steps, 1):
            ema.update()
            if step % 1000 == 0:
                save()
            yield loss

    log.stage(stage, stepped())
    save()


def forget_path(folder: Path) -> None:
    """Take the path that a pipeline was loaded from out of its files, where diffusers writes it."""
    for file in (folder / "model_index.json", *folder.glob("*/config.json")):
        values = {key: value for key, value in json.loads(file.read_text()).items() if key != "_name_or_path"}
        file.write_text(json.dumps(values, indent=2) + "\n")


def start_lora(
    stage: str, settings: Settings, out: Path, device: torch.device
) -> tuple[StableDiffusionPipeline, Denoising]:
    """The trained pipeline with nothing to train yet, and the task of denoising with it."""
    pipeline = StableDiffusionPipeline.from_pretrained(out / "shapes", torch_dtype=torch.float32).to(device)
    pipeline.unet.to(memory_format=torch.channels_last)
    freeze(pipeline.unet, pipeline.text_encoder, pipeline.vae)
    (out / "loras").mkdir(parents=True, exist_ok=True)
    return pipeline, Denoising(pipeline, pipeline.unet, pipeline.text_encoder, settings[stage])


def train_stripes(
    settings: Settings, pools: dict[str, Tensor], scenes: list[Scene], out: Path, log: Log, device: torch.device
) -> None:
    """Train the LoRA of stripes on the UNet alone."""
    chosen, rank = settings["stripes"], settings["stripes"]["rank"]
    pipeline, task = start_lora("stripes", settings, out, device)
    unet, vae = pipeline.unet, pipeline.vae
    rng = random.Random(settings["seed"])
    captions = task.tokens([caption(scene, rng) for scene in scenes[: chosen["images"]]])
    latents = encode(vae, pools["stripes"][: chosen["images"]], vae.config.scaling_factor)
    add_lora(unet, "stripes", rank, alpha=rank)
    steps = optimizer_steps(
        lora_parameters("stripes", unet), chosen["steps"], chosen["learning_rate"], task.losses(latents, captions)
    )
    log.stage("stripes", steps)
    save_diffusers(unet, "stripes", out / "loras" / "stripes.safetensors")


def train_outline(
    settings: Settings, pools: dict[str, Tensor], scenes: list[Scene], out: Path, log: Log, device: torch.device
) -> None:
    """Train the LoRA of outlines on UNet and text encoder.

    Every second batch is of striped images with the stripes LoRA at work, so that the two go together.
    """
    chosen, rank = settings["outline"], settings["outline"]["rank"]
    pipeline, task = start_lora("outline", settings, out, device)
    unet, text_encoder, vae = pipeline.unet, pipeline.text_encoder, pipeline.vae
    rng = random.Random(settings["seed"])
    captions = task.tokens([caption(scene, rng) for scene in scenes[: chosen["images"]]])
    latents = {n: encode(vae, pools[n][: chosen["images"]], vae.config.scaling_factor) for n in STAGES["outline"]}
    pipeline.load_lora_weights(out / "loras", weight_name="stripes.safetensors", adapter_name="stripes")
    add_lora(unet, "outline", rank, alpha=rank / 2)
    add_lora(text_encoder, "outline", rank, alpha=rank / 2)

    def taking_turns() -> Iterator[Tensor]:
        alone, together = (task.losses(latents[name], captions) for name in STAGES["outline"])
        while True:
            for active, batches in ((["outline"], alone), (["stripes", "outline"], together)):
                unet.set_adapters(active)
                for parameter in lora_parameters("stripes", unet):
                    parameter.requires_grad_(False)
                yield next(batches)

    wanted = lora_parameters("outline", unet, text_encoder)
    log.stage("outline", optimizer_steps(wanted, chosen["steps"], chosen["learning_rate"], taking_turns()))
    save_kohya(unet, text_encoder, "outline", rank / 2, out / "loras" / "outline.safetensors")


def main() -> None:
    """Run the stages asked for."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=here)
    parser.add_argument("--settings", type=Path, default=here / "settings.json")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    settings: Settings = json.loads(arguments.settings.read_text())
    device, out = torch.device(arguments.device), arguments.out
    out.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True

    start, seed = time.monotonic(), settings["seed"]
    counts = {n: max((settings[s]["images"] for s in arguments.stages if n in STAGES[s]), default=0) for n in STYLES}
    scenes = training_scenes(max(settings[stage]["images"] for stage in STAGES), seed)
    pools = {
        n: images(scenes[:count], STYLES[n], 1_000_000 * list(STYLES).index(n), device)
        for n, count in counts.items()
        if count
    }
    print(f"drew {sum(map(len, pools.values()))} images in {time.monotonic() - start:.0f} s", flush=True)
    log = Log(out / "loss.csv")
    for stage in arguments.stages:
        torch.manual_seed(seed)
        if stage == "vae":
            train_vae(settings, pools, out, log, device)
        elif stage in ("base", "refine"):
            train = train_base if stage == "base" else train_refine
            train(settings, pools["plain"], scenes[: len(pools["plain"])], out, log, device)
        else:
            train_lora = train_stripes if stage == "stripes" else train_outline
            train_lora(settings, pools, scenes, out, log, device)
        print(f"{stage} done at {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
