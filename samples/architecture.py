"""The untrained parts of the sample pipeline: SD1.5's kinds of blocks, made small, and a tokenizer of its own."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from sdflow.samples.scene import PIXELS

TEXT_WIDTH = 128
TOKENS = 77
START, END = "<|startoftext|>", "<|endoftext|>"


def make_vae() -> AutoencoderKL:
    """8x downsampling to 4 latent channels; widths are multiples of 64, as ORT's CUDA GroupNorm reads channel pairs."""
    return AutoencoderKL(
        sample_size=PIXELS,
        latent_channels=4,
        block_out_channels=(64, 64, 128, 128),
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    )


def make_unet() -> UNet2DConditionModel:
    """SD1.5's block types with three levels instead of four; latents [batch, 4, 16, 16]."""
    return UNet2DConditionModel(
        sample_size=PIXELS // 8,
        block_out_channels=(64, 128, 128),
        layers_per_block=1,
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=4,  # read as the number of heads, as in SD1.5's config
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        mid_block_type="UNetMidBlock2DCrossAttn",
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    )


def make_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """Three layers of CLIP's text transformer, as wide as the UNet's cross-attention expects."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=4 * TEXT_WIDTH,
            projection_dim=TEXT_WIDTH,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=TOKENS,
            hidden_act="quick_gelu",
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_scheduler() -> DDIMScheduler:
    """SD1.5's noise schedule: scaled linear betas, prediction of the noise.

    Trailing steps start from the noisiest one. The first of leading ones keeps so much of the image that the model
    trusts what it sees in pure noise over the prompt (Lin et al., arXiv 2305.08891).
    """
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        timestep_spacing="trailing",
        prediction_type="epsilon",
    )


def make_tokenizer(captions: list[str], folder: Path) -> CLIPTokenizer:
    """Write a byte-pair vocabulary in CLIP's files, in which each of the captions' words is one token, and load it."""
    merges = byte_pair_merges(captions)
    bytes_ = sorted(printable_bytes())
    tokens = [*bytes_, *(b + "</w>" for b in bytes_), *(a + b for a, b in merges), START, END]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}, ensure_ascii=False) + "\n")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": TOKENS,
        "do_lower_case": True,
        "bos_token": START,
        "eos_token": END,
        "unk_token": END,
        "pad_token": END,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    special = {key: value for key, value in config.items() if str(key).endswith("_token")}
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")
    return CLIPTokenizer.from_pretrained(folder)


def printable_bytes() -> list[str]:
    """GPT-2's stand-in character for each of the 256 bytes (openai/gpt-2, encoder.py, bytes_to_unicode)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [b for b in range(256) if b not in plain]
    return [chr(b) for b in plain] + [chr(256 + i) for i in range(len(others))]


def byte_pair_merges(captions: list[str]) -> list[tuple[str, str]]:
    """Merge the most frequent pair of neighbours until every word is one token (Sennrich et al., arXiv 1508.07909)."""
    counts = Counter(word for text in captions for word in text.replace(",", " ").split())
    words = {word: (*word[:-1], word[-1] + "</w>") for word in counts}
    merges: list[tuple[str, str]] = []
    while pairs := Counter({p: 0 for w in words.values() for p in pairwise(w)}):
        for word, parts in words.items():
            for pair in pairwise(parts):
                pairs[pair] += counts[word]
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        words = {word: _merged(parts, best) for word, parts in words.items()}
    return merges


def _merged(parts: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for part in parts:
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return tuple(out)
