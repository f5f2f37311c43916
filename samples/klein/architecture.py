"""The untrained parts of the sample in FLUX.2-klein's shape: diffusers' own classes, made small, and a tokenizer of its own."""

import json
from pathlib import Path

from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel
from tokenizers import AddedToken, Tokenizer, models, trainers
from transformers import Qwen2TokenizerFast, Qwen3Config, Qwen3ForCausalLM

from sdflow.samples.scene import PIXELS

LIKE = Path(__file__).parents[2] / "sdflow/families/flux2/architectures/flux2-klein-4b"
"""Where the scheduler and the chat template are taken from."""
TEXT_WIDTH = 64
STATES = (9, 18, 27)
"""Hidden states that are read side by side (diffusers, Flux2KleinPipeline)."""
LATENT_CHANNELS = 8
END = "<|endoftext|>"
SPECIAL = ("<|im_start|>", "<|im_end|>")
PLAIN = ("<think>", "</think>")


def make_vae() -> AutoencoderKLFlux2:
    """4x downsampling to 8 latent channels, which are folded 2 x 2: a token is 8 x 8 pixels."""
    return AutoencoderKLFlux2(
        sample_size=PIXELS,
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(32, 64, 96),
        layers_per_block=1,
        norm_num_groups=16,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
    )


def make_transformer() -> Flux2Transformer2DModel:
    """Two double and four single blocks, 192 wide; rotary embeddings of four axes, one modulation for all blocks of a kind."""
    return Flux2Transformer2DModel(
        in_channels=4 * LATENT_CHANNELS,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=6,
        joint_attention_dim=len(STATES) * TEXT_WIDTH,
        timestep_guidance_channels=128,
        axes_dims_rope=(8, 8, 8, 8),
        guidance_embeds=False,
    )


def make_text_encoder(tokenizer: Qwen2TokenizerFast) -> Qwen3ForCausalLM:
    """28 layers, as many as the pipeline's choice of hidden states needs, 64 wide."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            num_hidden_layers=28,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=1024,
            rope_theta=1000000,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """FLUX.2-klein's: flow matching, with a shift that follows the number of tokens and steps."""
    return FlowMatchEulerDiscreteScheduler.from_config(
        json.loads((LIKE / "scheduler/scheduler_config.json").read_text())
    )


def make_tokenizer(texts: list[str], folder: Path) -> Qwen2TokenizerFast:
    """Write a byte-pair vocabulary in Qwen's files, in which the texts' words are mostly one token each, and load it."""
    like = Tokenizer.from_file(str(LIKE / "tokenizer/tokenizer.json"))
    made = Tokenizer(models.BPE())
    made.normalizer, made.pre_tokenizer = like.normalizer, like.pre_tokenizer
    made.decoder, made.post_processor = like.decoder, like.post_processor
    alphabet = sorted(token for token in like.get_vocab() if len(token) == 1)
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=1024, min_frequency=20, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens([END, *SPECIAL])
    made.add_tokens([AddedToken(token, special=False) for token in PLAIN])
    tokenizer = Qwen2TokenizerFast(
        tokenizer_object=made,
        pad_token=END,
        eos_token="<|im_end|>",
        additional_special_tokens=[SPECIAL[0]],
        model_max_length=131072,
    )
    tokenizer.chat_template = (LIKE / "tokenizer/chat_template.jinja").read_text()
    tokenizer.save_pretrained(folder)
    return Qwen2TokenizerFast.from_pretrained(folder)
