"""Train the sample pipeline from nothing: its VAE, its text encoder and UNet, a refinement of both, then two LoRAs.

    python samples/train.py --out samples

Every stage writes its result into the folder and reads the earlier stages' from there: `--stages outline` alone is fine.
Settings are in samples/settings.json; the pictures are drawn here (sdflow/samples/scene.py), nothing is downloaded.
"""

import argparse
import copy
import csv
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from itertools import islice
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np
import torch
from architecture import make_scheduler, make_text_encoder, make_tokenizer, make_unet, make_vae
from curve import plot
from diffusers import AutoencoderKL, StableDiffusionPipeline
from lora import add_lora, freeze, lora_parameters, save_diffusers, save_kohya
from torch import Tensor, nn
from torch.nn import functional

from sdflow.samples.prompts import caption
from sdflow.samples.scene import Scene, Style, all_scenes, draw, is_held_out

STYLES = {
    "plain": Style(),
    "stripes": Style(stripes=True),
    "outline": Style(outline=True),
    "both": Style(stripes=True, outline=True),
}
Settings = dict[str, Any]
STAGES = {  # each stage, and the pictures that it needs
    "vae": ("plain", "stripes", "outline", "both"),
    "base": ("plain",),
    "refine": ("plain",),
    "stripes": ("stripes",),
    "outline": ("outline", "both"),
}


class Log:
    """The loss of every stage, printed now and then and kept for the curve."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[tuple[str, int, float]] = []
        if path.exists():
            with path.open() as file:
                self.rows = [(r["stage"], int(r["step"]), float(r["loss"])) for r in csv.DictReader(file)]

    def stage(self, name: str, losses: Iterator[Tensor], every: int = 25) -> None:
        """Run a stage's steps, keeping the mean loss of each `every` steps."""
        self.rows = [row for row in self.rows if row[0] != name]
        start, step = time.monotonic(), 0
        while since := list(islice(losses, every)):
            step += len(since)
            mean = torch.stack(since).mean().item()
            if not math.isfinite(mean):
                raise SystemExit(f"{name}: the loss is {mean} at step {step}: lower its learning_rate")
            self.rows.append((name, step, mean))
            if step % (20 * every) == 0 or step == every:
                print(f"{name} step {step} loss {mean:.5f} {time.monotonic() - start:.0f} s", flush=True)
        with self.path.open("w", newline="") as file:
            csv.writer(file).writerows([("stage", "step", "loss"), *self.rows])
        plot(self.rows, self.path.with_suffix(".png"))


def training_scenes(count: int, seed: int) -> list[Scene]:
    """Scenes drawn evenly from the combinations that are not held out."""
    allowed = [scene for scene in all_scenes() if not is_held_out(scene)]
    return random.Random(seed).choices(allowed, k=count)


def _draw(job: tuple[Scene, int, Style]) -> np.ndarray:
    return draw(*job)


def pictures(scenes: list[Scene], style: Style, seed: int, device: torch.device) -> Tensor:
    """uint8 pictures [count, 3, 128, 128] on the device, in channels-last order."""
    with Pool() as pool:
        drawn = pool.map(_draw, [(scene, seed + i, style) for i, scene in enumerate(scenes)], chunksize=256)
    return torch.from_numpy(np.stack(drawn)).to(device).permute(0, 3, 1, 2)


def as_input(picture: Tensor) -> Tensor:
    """uint8 pictures to floats in [-1, 1]."""
    return picture.float() / 127.5 - 1.0


def mixed_precision(device: torch.device) -> torch.autocast:
    """bfloat16 where the device is fast at it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


class Ema:
    """An exponential moving average of modules' parameters, short-sighted at first."""

    def __init__(self, modules: list[nn.Module], decay: float) -> None:
        self.live = [p for m in modules for p in m.parameters()]
        self.modules = [copy.deepcopy(m) for m in modules]
        self.kept = [p for m in self.modules for p in m.parameters()]
        self.decay, self.count = decay, 0

    @torch.no_grad()
    def update(self) -> None:
        """Take the live parameters in."""
        self.count += 1
        decay = min(self.decay, (1 + self.count) / (10 + self.count))
        torch._foreach_lerp_(self.kept, self.live, 1.0 - decay)


def optimizer_steps(parameters: list[Tensor], steps: int, rate: float, losses: Iterator[Tensor]) -> Iterator[Tensor]:
    """AdamW with a short warm-up and a cosine to zero; yields each step's loss, detached."""
    fused = parameters[0].is_cuda
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01, betas=(0.9, 0.99), fused=fused)
    warm_up = max(1, min(200, steps // 10))
    for step in range(steps):
        factor = min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate * factor
        loss = next(losses)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.detach()


def maybe_compiled(module: nn.Module, settings: Settings) -> nn.Module:
    """The module under torch.compile where the settings ask for it."""
    return torch.compile(module) if settings["compile"] else module  # type: ignore[return-value]


def train_vae(settings: Settings, pools: dict[str, Tensor], out: Path, log: Log, device: torch.device) -> None:
    """Train the autoencoder on all styles; its scaling factor makes the plain pictures' latents unit variance."""
    chosen = settings["vae"]
    vae = make_vae().to(device, memory_format=torch.channels_last)
    ema = Ema([vae], chosen["ema_decay"])
    compiled = maybe_compiled(Autoencode(vae), settings)
    names, batch = list(pools), chosen["batch"]

    def losses() -> Iterator[Tensor]:
        while True:
            taken = [pools[n][torch.randint(len(pools[n]), (batch // len(names),), device=device)] for n in names]
            images = as_input(torch.cat(taken)).contiguous(memory_format=torch.channels_last)
            with mixed_precision(device):
                again, mean, log_variance = compiled(images)
            mean, log_variance = mean.float(), log_variance.float().clamp(-30, 20)
            kl = 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance).mean()
            yield functional.l1_loss(again.float(), images) + chosen["kl_weight"] * kl

    def stepped() -> Iterator[Tensor]:
        for loss in optimizer_steps(list(vae.parameters()), chosen["steps"], chosen["learning_rate"], losses()):
            ema.update()
            yield loss

    log.stage("vae", stepped())
    trained = ema.modules[0]
    assert isinstance(trained, AutoencoderKL)
    sample = encode(trained, pools["plain"][:4096], 1.0)
    trained.register_to_config(scaling_factor=round(1.0 / sample.std().item(), 5))
    trained.half().to(memory_format=torch.contiguous_format).save_pretrained(out / "shapes" / "vae")


class Autoencode(nn.Module):
    """Encoder, one sample, decoder, as one module to compile."""

    def __init__(self, vae: AutoencoderKL) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Images [n, 3, h, w] to their reconstruction and the latents' mean and log variance."""
        mean, log_variance = self.vae.quant_conv(self.vae.encoder(images)).chunk(2, dim=1)
        latents = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance.clamp(-30, 20))
        return self.vae.decoder(self.vae.post_quant_conv(latents)), mean, log_variance


@torch.no_grad()
def encode(vae: AutoencoderKL, images: Tensor, scale: float) -> Tensor:
    """Latents [n, 4, 16, 16] of uint8 pictures: the posterior's mean times `scale`."""
    parts = []
    for part in images.split(512):
        with mixed_precision(part.device):
            parts.append(vae.encode(as_input(part)).latent_dist.mean.float() * scale)
    return torch.cat(parts)


class Denoising:
    """Batches of noised latents with captions, and the loss of predicting their noise."""

    def __init__(
        self, pipeline: StableDiffusionPipeline, unet: nn.Module, text_encoder: nn.Module, settings: Settings
    ) -> None:
        self.unet, self.text_encoder, self.settings = unet, text_encoder, settings
        self.tokenizer = pipeline.tokenizer
        self.device = pipeline.unet.device
        self.alphas = pipeline.scheduler.alphas_cumprod.to(self.device)
        self.empty = self.tokens([""])[0]

    def tokens(self, texts: list[str]) -> Tensor:
        """Token ids [n, 77]."""
        ids = self.tokenizer(texts, padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
        return ids.to(self.device)

    def losses(self, latents: Tensor, captions: Tensor) -> Iterator[Tensor]:
        """Mean squared error of the predicted noise, a batch at a time, for ever.

        Some captions are dropped, and some are those of another picture, as on the web: without guidance the model then
        follows its prompt only that often, and guidance has something to do.
        """
        batch = self.settings["batch"]
        while True:
            chosen = torch.randint(len(latents), (batch,), device=self.device)
            clean, ids = latents[chosen], captions[chosen]
            fate = torch.rand(batch, device=self.device)
            dropped = fate < self.settings["caption_dropped"]
            other = fate > 1.0 - self.settings["caption_of_another"]
            ids = torch.where(other[:, None], ids.roll(1, 0), ids)
            ids = torch.where(dropped[:, None], self.empty, ids)
            noise = torch.randn_like(clean)
            times = torch.randint(1000, (batch,), device=self.device)
            alpha = self.alphas[times][:, None, None, None]
            noised = (alpha.sqrt() * clean + (1.0 - alpha).sqrt() * noise).contiguous(memory_format=torch.channels_last)
            with mixed_precision(self.device):
                states = self.text_encoder(ids)[0]
                predicted = self.unet(noised, times, states, return_dict=False)[0]
            # 1 / alpha makes the error that of v-prediction (Salimans and Ho, arXiv 2202.00512), which the noisiest
            # steps share in full; a limit of 1 leaves the plain error of the noise.
            weight = (1.0 / alpha).clamp(max=self.settings["largest_weight"])
            yield (weight * (predicted.float() - noise).square()).mean()


def train_base(
    settings: Settings, plain: Tensor, scenes: list[Scene], out: Path, log: Log, device: torch.device
) -> None:
    """Train text encoder and UNet together on plain pictures and write the whole pipeline's folder."""
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
    plain, texts = plain[: chosen["pictures"]], texts[: chosen["pictures"]]
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
    captions = task.tokens([caption(scene, rng) for scene in scenes[: chosen["pictures"]]])
    latents = encode(vae, pools["stripes"][: chosen["pictures"]], vae.config.scaling_factor)
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

    Every second batch is of striped pictures with the stripes LoRA at work, so that the two go together.
    """
    chosen, rank = settings["outline"], settings["outline"]["rank"]
    pipeline, task = start_lora("outline", settings, out, device)
    unet, text_encoder, vae = pipeline.unet, pipeline.text_encoder, pipeline.vae
    rng = random.Random(settings["seed"])
    captions = task.tokens([caption(scene, rng) for scene in scenes[: chosen["pictures"]]])
    latents = {n: encode(vae, pools[n][: chosen["pictures"]], vae.config.scaling_factor) for n in STAGES["outline"]}
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
    counts = {n: max((settings[s]["pictures"] for s in arguments.stages if n in STAGES[s]), default=0) for n in STYLES}
    scenes = training_scenes(max(settings[stage]["pictures"] for stage in STAGES), seed)
    pools = {
        n: pictures(scenes[:count], STYLES[n], 1_000_000 * list(STYLES).index(n), device)
        for n, count in counts.items()
        if count
    }
    print(f"drew {sum(map(len, pools.values()))} pictures in {time.monotonic() - start:.0f} s", flush=True)
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
