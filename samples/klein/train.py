"""Train the sample in FLUX.2-klein's shape from nothing: its VAE, then text encoder and transformer together.

    python samples/klein/train.py --out samples/shapes-klein

A flow-matching transformer that draws from a prompt, or changes a reference image as a prompt says. It never sees a prompt
that is not its image's, so that it needs no guidance, and half of its training is at the four noise levels of a drawing in
four steps. Each stage writes its result into the folder and reads the earlier ones' from there; `--stages long` alone is
fine. Settings: samples/klein/settings.json. Images are drawn here, nothing is downloaded.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import Pool
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parents[1]))  # what the other sample is trained with

import numpy as np
import torch
from autoencoder import trained
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from optimize import Ema, Log, mixed_precision, optimizer_steps
from torch import Tensor, nn
from torch.nn import functional
from training_images import as_input, images, training_scenes

from samples.klein.architecture import (
    STATES,
    make_scheduler,
    make_text_encoder,
    make_tokenizer,
    make_transformer,
    make_vae,
)
from samples.klein.edits import Edit, training_edits
from sdflow.samples.prompts import KLEIN, caption
from sdflow.samples.scene import PLAIN, Scene, draw

HERE = Path(__file__).parent
Settings = dict[str, Any]
STAGES = ("vae", "base", "long")


def maybe_compiled(module: nn.Module, settings: Settings) -> nn.Module:
    """Compiled where the settings ask for it, for each shape anew."""
    return torch.compile(module, dynamic=False) if settings["compile"] else module  # type: ignore[return-value]


def train_vae(settings: Settings, pool: Tensor, out: Path, log: Log, device: torch.device) -> None:
    """Train the autoencoder; the statistics of its folded latents become those of its batch norm."""
    chosen = settings["vae"]
    vae = make_vae().to(device, memory_format=torch.channels_last)

    def batch() -> Tensor:
        return pool[torch.randint(len(pool), (chosen["batch"],), device=device)]

    average = trained(vae, chosen, partial(maybe_compiled, settings=settings), batch, log)
    folded = Flux2KleinPipeline._patchify_latents(means(average, pool[:8192]))
    average.bn.running_mean.copy_(folded.mean((0, 2, 3)))
    average.bn.running_var.copy_(folded.var((0, 2, 3)))
    average.half().to(memory_format=torch.contiguous_format).save_pretrained(out / "vae")


@torch.no_grad()
def means(vae: AutoencoderKLFlux2, pictures: Tensor) -> Tensor:
    """The posterior's means [n, c, h, w] of uint8 images."""
    parts = []
    for part in pictures.split(256):
        with mixed_precision(part.device):
            parts.append(vae.encode(as_input(part)).latent_dist.mean.float())
    return torch.cat(parts)


def tokens_of(vae: AutoencoderKLFlux2, pictures: Tensor) -> Tensor:
    """Folded, normalized and packed latents [n, tokens, channels] of uint8 images, in 16 bits."""
    mean = vae.bn.running_mean.float().view(1, -1, 1, 1)
    deviation = torch.sqrt(vae.bn.running_var.float().view(1, -1, 1, 1) + vae.config.batch_norm_eps)
    parts = []
    for part in pictures.split(2048):
        folded = Flux2KleinPipeline._patchify_latents(means(vae, part))
        parts.append(Flux2KleinPipeline._pack_latents((folded - mean) / deviation).to(torch.bfloat16))
    return torch.cat(parts)


def _both(made: Edit) -> tuple[np.ndarray, np.ndarray]:
    return draw(made.before, made.seed, PLAIN), draw(made.after, made.seed, PLAIN)


class Data:
    """Latents of images with several captions each, and of pairs of images with an instruction."""

    def __init__(self, settings: Settings, vae: AutoencoderKLFlux2, tokenizer: Any, device: torch.device) -> None:
        chosen, rng = settings["data"], random.Random(settings["seed"] + 2)
        scenes = training_scenes(chosen["images"], settings["seed"])
        self.images = tokens_of(vae, images(scenes, PLAIN, 0, device))
        self.captions = Texts(
            tokenizer, [[caption(each, rng, KLEIN) for _ in range(chosen["captions"])] for each in scenes], device
        )
        pairs = training_edits(training_scenes(chosen["edits"], settings["seed"] + 1), rng, 200_000)
        with Pool() as pool:
            drawn = pool.map(_both, pairs, chunksize=256)
        self.before, self.after = (
            tokens_of(vae, torch.from_numpy(np.stack(side)).to(device).permute(0, 3, 1, 2))
            for side in zip(*drawn, strict=True)
        )
        self.instructions = Texts(tokenizer, [[pair.instruction] for pair in pairs], device)


class Texts:
    """Token ids of texts, several for an item, as the pipeline asks its text encoder."""

    def __init__(self, tokenizer: Any, texts: list[list[str]], device: torch.device) -> None:
        known: dict[str, int] = {}
        index = [[known.setdefault(text, len(known)) for text in each] for each in texts]
        chats = [chat(tokenizer, text) for text in known]
        found = tokenizer(chats, padding="max_length", max_length=64, truncation=False, return_tensors="pt")
        assert found.input_ids.shape[1] == 64, "a text is longer than the training's tokens"
        self.index = torch.tensor(index, device=device)
        self.ids, self.mask = found.input_ids.to(device), found.attention_mask.to(device)
        self.pad = tokenizer.pad_token_id

    def of(self, chosen: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Ids and mask [n, length] of one text of each item."""
        which = torch.randint(self.index.shape[1], (len(chosen),), device=chosen.device)
        rows = self.index[chosen, which]
        more = length - self.ids.shape[1]
        return functional.pad(self.ids[rows], (0, more), value=self.pad), functional.pad(self.mask[rows], (0, more))


def chat(tokenizer: Any, text: str) -> str:
    asked = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True, enable_thinking=False))


class Velocity(nn.Module):
    """Text encoder and transformer: noised latents, their noise level and ids of text to the velocity of flow matching."""

    def __init__(self, text_encoder: nn.Module, transformer: nn.Module, settings: Settings) -> None:
        super().__init__()
        self.text_encoder, self.transformer = text_encoder, transformer
        self.blocks = maybe_compiled(transformer, settings)
        self.text = text_encoder.model

    def forward(
        self, noised: Tensor, sigma: Tensor, ids: Tensor, mask: Tensor, places: Tensor, reference: Tensor | None
    ) -> Tensor:
        found = self.text(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
        states = torch.cat([found.hidden_states[layer] for layer in STATES], -1)
        text_places = torch.zeros(ids.shape[1], 4, device=ids.device)
        text_places[:, 3] = torch.arange(ids.shape[1], device=ids.device)
        given = noised if reference is None else torch.cat([noised, reference], 1)
        predicted = self.blocks(
            hidden_states=given,
            timestep=sigma,
            guidance=None,
            encoder_hidden_states=states,
            txt_ids=text_places,
            img_ids=places,
            return_dict=False,
        )[0]
        return predicted[:, : noised.shape[1]]


def places_of(side: int, references: int, device: torch.device) -> Tensor:
    """Ids [tokens, 4] of an image's tokens and of those of references, as the pipeline makes them."""
    rows = torch.arange(side)
    times = [0, *(10 + 10 * each for each in range(references))]
    return torch.cat([torch.cartesian_prod(torch.tensor([time]), rows, rows, torch.tensor([0])) for time in times]).to(
        device
    )


def noise_levels(count: int, settings: Settings, tokens: int, device: torch.device) -> Tensor:
    """Half of them those of a drawing in few steps, the others anywhere, more of them high."""
    few = settings["few_steps"]
    mu = compute_empirical_mu(tokens, few["steps"])
    spread = torch.linspace(1.0, 1 / few["steps"], few["steps"], device=device)
    alpha = float(np.exp(mu))
    levels = alpha * spread / (1 + (alpha - 1) * spread)
    fixed = levels[torch.randint(len(levels), (count,), device=device)]
    free = torch.rand(count, device=device)
    free = few["shift"] * free / (1 + (few["shift"] - 1) * free)
    return torch.where(torch.rand(count, device=device) < few["share"], fixed, free)


def train_velocity(stage: str, settings: Settings, out: Path, log: Log, device: torch.device) -> None:
    """Train text encoder and transformer together, from nothing or from what the folder holds."""
    chosen = settings[stage]
    vae = AutoencoderKLFlux2.from_pretrained(out / "vae", torch_dtype=torch.float32).to(device)
    if stage == "base":
        rng = random.Random(settings["seed"])
        known = [caption(scene, rng, KLEIN) for scene in training_scenes(20000, settings["seed"])]
        known += [each.instruction for each in training_edits(training_scenes(20000, settings["seed"]), rng, 0)]
        tokenizer = make_tokenizer(known, out / "tokenizer")
        text_encoder, transformer = make_text_encoder(tokenizer).to(device), make_transformer().to(device)
    else:
        pipeline = Flux2KleinPipeline.from_pretrained(out, torch_dtype=torch.float32)
        tokenizer = pipeline.tokenizer
        text_encoder, transformer = pipeline.text_encoder.to(device), pipeline.transformer.to(device)
    start = time.monotonic()
    data = Data(settings, vae, tokenizer, device)
    print(f"data {time.monotonic() - start:.0f} s, {len(data.captions.ids)} captions", flush=True)
    model = Velocity(text_encoder, transformer, settings)
    parameters = [p for p in [*text_encoder.parameters(), *transformer.parameters()] if p.requires_grad]
    print(f"{sum(p.numel() for p in parameters) / 1e6:.2f} M parameters", flush=True)
    ema = Ema([text_encoder, transformer], chosen["ema_decay"])
    count = data.images.shape[1]
    side = int(count**0.5)
    plain, edited = places_of(side, 0, device), places_of(side, 1, device)

    def loss_of(clean: Tensor, text: tuple[Tensor, Tensor], places: Tensor, reference: Tensor | None) -> Tensor:
        sigma = noise_levels(len(clean), settings, count, device)
        noise, clean = torch.randn(clean.shape, device=device), clean.float()
        noised = sigma[:, None, None] * noise + (1 - sigma[:, None, None]) * clean
        with mixed_precision(device):
            predicted = model(noised, sigma, *text, places, reference)
        return functional.mse_loss(predicted.float(), noise - clean)

    def losses() -> Iterator[Tensor]:
        while True:
            taken = torch.randint(len(data.images), (chosen["batch"],), device=device)
            yield loss_of(data.images[taken], data.captions.of(taken, chosen["tokens"]), plain, None)
            taken = torch.randint(len(data.before), (chosen["edits_batch"],), device=device)
            text = data.instructions.of(taken, chosen["tokens"])
            yield loss_of(data.after[taken], text, edited, data.before[taken].float())

    def stepped() -> Iterator[Tensor]:
        for loss in optimizer_steps(parameters, chosen["steps"], chosen["learning_rate"], losses()):
            ema.update()
            yield loss

    log.stage(stage, stepped())
    trained_text, trained = ema.modules
    Flux2KleinPipeline(
        scheduler=make_scheduler(),
        vae=vae.half(),
        text_encoder=trained_text.half(),
        tokenizer=tokenizer,
        transformer=trained.half(),
        is_distilled=True,
    ).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--settings", type=Path, default=HERE / "settings.json")
    given = parser.parse_args()
    settings = json.loads(given.settings.read_text())
    given.out.mkdir(parents=True, exist_ok=True)
    device, log = torch.device(given.device), Log(HERE / "loss.csv")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    train = {"vae": train_the_vae, "base": partial(train_velocity, "base"), "long": partial(train_velocity, "long")}
    for stage in given.stages:
        torch.manual_seed(settings["seed"] + STAGES.index(stage))
        start = time.monotonic()
        train[stage](settings, given.out, log, device)
        print(f"{stage}: {time.monotonic() - start:.0f} s", flush=True)


def train_the_vae(settings: Settings, out: Path, log: Log, device: torch.device) -> None:
    scenes: list[Scene] = training_scenes(settings["vae"]["images"], settings["seed"] + 3)
    train_vae(settings, images(scenes, PLAIN, 900_000, device), out, log, device)


if __name__ == "__main__":
    main()
