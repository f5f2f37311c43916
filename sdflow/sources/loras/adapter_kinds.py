"""Which kind of adapter a file or a PEFT configuration holds, where it is not a plain LoRA: `run`, `bake`, `validate`, `serve`
and `inspect` name it alike.

LoRA, LoHa, LoKr, their DoRA, and differences of weights are merged (`layers.py`). Every other kind is refused by name: as a LoRA
it would be merged wrongly, or only in part. Of PEFT's LoraConfig every field is honoured, refused by name, or without effect on a
merge. Tests hold the tables to the PEFT that is installed, so that what is new there fails them until it is decided here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

Decision = Literal["honoured", "refused", "without effect"]

MERGE_WITH_PEFT = (
    "Merge it with PEFT (merge_and_unload), save the model (save_pretrained) and name it under `components`."
)
MERGE_ELSEWHERE = "Merge it into the checkpoint with the program that made it and use the result as `model`."
USE_A_LORA = "Use a plain LoRA instead."


@dataclass(frozen=True)
class PeftType:
    """A kind of adapter of PEFT's. merges: whether its merge_and_unload puts it into the weights of a model. read: sdflow merges
    it."""

    title: str
    merges: bool = True
    read: bool = False


PEFT_TYPES: Mapping[str, PeftType] = {
    "ADALORA": PeftType("AdaLoRA"),
    "ADAMSS": PeftType("AdaMSS"),
    "ADAPTION_PROMPT": PeftType("LLaMA-Adapter (adaption prompt)", merges=False),
    "BEFT": PeftType("BEFT"),
    "BOFT": PeftType("BOFT"),
    "C3A": PeftType("C3A"),
    "CARTRIDGE": PeftType("Cartridge", merges=False),
    "CPT": PeftType("context-aware prompt tuning (CPT)", merges=False),
    "DEFT": PeftType("DEFT"),
    "DELORA": PeftType("DeLoRA"),
    "FOURIERFT": PeftType("FourierFT"),
    "FROD": PeftType("FRoD"),
    "GLORA": PeftType("GLoRA"),
    "GRALORA": PeftType("GraLoRA"),
    "HIRA": PeftType("HiRA"),
    "HRA": PeftType("HRA"),
    "IA3": PeftType("(IA)3"),
    "LILY": PeftType("Lily", merges=False),
    "LN_TUNING": PeftType("LN tuning"),
    "LOHA": PeftType("LoHa", read=True),
    "LOKR": PeftType("LoKr", read=True),
    "MISS": PeftType("MiSS"),
    "MULTITASK_PROMPT_TUNING": PeftType("multitask prompt tuning", merges=False),
    "OFT": PeftType("OFT"),
    "OSF": PeftType("OSF"),
    "PEANUT": PeftType("PEANuT"),
    "POLY": PeftType("Poly", merges=False),
    "PREFIX_TUNING": PeftType("prefix tuning", merges=False),
    "PROMPT_TUNING": PeftType("prompt tuning", merges=False),
    "PSOFT": PeftType("PSOFT"),
    "PVERA": PeftType("PVeRA"),
    "P_TUNING": PeftType("P-tuning", merges=False),
    "RANDLORA": PeftType("RandLoRA"),
    "ROAD": PeftType("RoAd"),
    "SHADOW": PeftType("Shadow", merges=False),
    "SHIRA": PeftType("SHiRA"),
    "SUPERTUNING": PeftType("SuperTuning"),
    "TINYLORA": PeftType("TinyLoRA"),
    "TRAINABLE_TOKENS": PeftType("training of single tokens (trainable tokens)"),
    "UNILORA": PeftType("Uni-LoRA"),
    "VBLORA": PeftType("VB-LoRA"),
    "VERA": PeftType("VeRA"),
    "WAVEFT": PeftType("WaveFT"),
    "XLORA": PeftType("X-LoRA", merges=False),
}
"""`peft_type` -> the kind. A test holds the table to the PEFT that is installed."""

_IN_NAMES = {
    each: rf"(\.|^base_model\.){each.lower()}_"
    for each in PEFT_TYPES
    if each not in ("ADALORA", "FROD", "IA3", "LOHA", "LOKR", "OFT", "TRAINABLE_TOKENS", "XLORA")
}
"""How PEFT names the tensors of most of its kinds."""

_Dims = tuple[int, ...]

_READ: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\.dora_scale$|\.lora_magnitude_vector(\.weight)?$"), "DoRA"),
    (re.compile(r"\.hada_(w[12]_[ab]|t[12])$"), "LoHa"),
    (re.compile(r"\.lokr_(w[12](_[ab])?|t2)$"), "LoKr"),
    (re.compile(r"\.lora_mid\.weight$"), "LoCon with a Tucker decomposition"),
    (re.compile(r"\.[wb]_norm$"), "trained norms"),
    (re.compile(r"\.diff(_b)?$"), "full difference"),
)
"""Those that are merged, by what only their tensors' names contain."""

_REFUSED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\.lora_magnitude_vector"), "DoRA of another form"),
    (re.compile(r"\.lora_[AB]\.bias$"), "a LoRA with biases of its own (lora_bias)"),
    (re.compile(r"\.lora_embedding_[AB]"), "embedding LoRA"),
    (re.compile(r"\.lora_(E|ranknum|[AB])$"), "AdaLoRA"),
    (re.compile(r"\.lora_diag$"), "KaSA"),
    (re.compile(r"\.base_layer\.bias$"), "a LoRA with biases of the model (bias)"),
    (re.compile(r"\.hada_"), "LoHa of another form"),
    (re.compile(r"\.lokr_"), "LoKr of another form"),
    (re.compile(r"\.(a1|a2|b1|b2|bm)\.weight$"), "GLoRA"),
    (re.compile(r"\.([qp]_layer\.weight|lambda_layer)$"), "T-LoRA"),
    (re.compile(r"\.oft_|\.oft\.|\.rescale$"), "OFT"),
    (re.compile(r"\.on_input$|\.ia3_l"), "(IA)3"),
    (re.compile(r"(\.|^base_model\.)frod_"), "FRoD"),
    (re.compile(r"\.trainable_tokens_"), "training of single tokens (trainable tokens)"),
    (re.compile(r"\.modules_to_save\."), "a LoRA with whole modules (modules_to_save)"),
    (re.compile(r"internal_xlora_classifier"), "X-LoRA"),
    (re.compile(r"^(string_to_param|bundle_emb)\."), "a LoRA with bundled embeddings"),
    *((re.compile(pattern), PEFT_TYPES[each].title) for each, pattern in _IN_NAMES.items()),
)  # fmt: skip
"""Kinds that are not merged, likewise."""
_KINDS = (*_READ, *_REFUSED)

_OFT_BLOCKS = ".oft_blocks"
_BUTTERFLY = 4
"""Dimensions of BOFT's blocks in LyCORIS, which names them as OFT's: its butterfly has several stages."""


def kind_of_tensor(name: str, shape: _Dims = ()) -> str | None:
    """The kind of adapter that a tensor of this name belongs to; None for a plain LoRA's, and for one that is unknown. Kinds that
    are merged are among `READ`."""
    if name.endswith(_OFT_BLOCKS) and len(shape) == _BUTTERFLY:
        return "BOFT"
    return next((kind for pattern, kind in _KINDS if pattern.search(name)), None)


def module_of_tensor(name: str) -> str | None:
    """What of such a tensor's name is its module's; None where `kind_of_tensor` knows none."""
    found = next((match for pattern, _ in _KINDS if (match := pattern.search(name))), None)
    return None if found is None else name[: found.start()]


READ = frozenset(kind for _, kind in _READ)
"""The kinds that are merged, besides plain LoRAs."""


def kind_of_config(peft_type: Any) -> PeftType | None:
    """The kind that PEFT's configuration names; None for a LoRA. One that is unknown has its `peft_type` for a title."""
    if peft_type is None or peft_type == "LORA":
        return None
    return PEFT_TYPES.get(str(peft_type), PeftType(str(peft_type)[:100], merges=False))


def title_of(peft_type: str) -> str:
    """The kind that PEFT's configuration names, one that is known, by its title."""
    return "LoRA" if peft_type == "LORA" else PEFT_TYPES[peft_type].title


@dataclass(frozen=True)
class Field:
    """A field of LoraConfig. plain: of one that is refused, the values besides null that make of the tensors nothing else than
    scale * up @ down. merges: of one that is refused, whether PEFT can merge such an adapter into the weights."""

    decision: Decision
    why: str
    plain: tuple[Any, ...] = ()
    merges: bool = True


def _refused(why: str, *plain: Any) -> Field:
    return Field("refused", why, plain)


_honoured, _no_effect = partial(Field, "honoured"), partial(Field, "without effect")
_unmergeable = partial(Field, "refused", merges=False)
_TENSORS_SAY = "Which modules are changed, the names of the tensors say."
_ORIGIN = "It says where the model or the file is from."
_BESIDE_INIT = "It is read by a way to begin that init_lora_weights names, and that is refused there where it matters."

LORA_CONFIG: Mapping[str, Field] = {
    "r": _honoured("The rank: the tensors must have it."),
    "lora_alpha": _honoured("The scale is alpha / r."),
    "rank_pattern": _honoured("Ranks by the names of modules; the first pattern that fits counts."),
    "alpha_pattern": _honoured("Alphas by the names of modules; the first pattern that fits counts."),
    "use_rslora": _honoured("The scale is alpha / sqrt(r): https://arxiv.org/abs/2312.03732."),
    "use_dora": _honoured("DoRA sets the norms of the merged weight: https://arxiv.org/abs/2402.09353."),
    "peft_type": _refused("OFT and others are other products of other tensors.", "LORA"),
    "bias": _refused("The file then holds biases that replace the model's.", "none"),
    "lora_bias": _refused("The file then holds biases that are added.", False),
    "modules_to_save": _refused("The file then holds whole modules that replace the model's.", []),
    "init_lora_weights": _refused(
        "PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA also change the weights that the LoRA is added to. The others begin with factors "
        "of their own alone.",
        *(True, False, "gaussian", "eva", "orthogonal", "mica"),
    ),
    "layer_replication": _refused("The model then has more layers than the checkpoint.", []),
    "trainable_token_indices": _refused("The file then holds rows of the embedding.", [], {}),
    "target_parameters": _refused("Factors of parameters that are no module's weight.", []),
    "alora_invocation_tokens": _unmergeable("The LoRA then counts from some tokens of a text on: nothing to merge."),
    "arrow_config": _unmergeable("The LoRA is then chosen anew for each token: nothing to merge."),
    "kasa_config": _refused("A singular value decomposition of the weights takes part."),
    "monteclora_config": _refused("The factors are then samples of a distribution."),
    "velora_config": _refused("The file then holds tensors of the training beside the factors."),
    "use_bdlora": _refused("The factors are then blocks on a diagonal.", False),
    "use_qalora": _refused("The inputs are then summed in groups before the factor.", False),
    "megatron_config": _refused("The factors are then parts, spread over machines."),
    "qalora_group_size": _no_effect("It is read where use_qalora is set, which is refused."),
    "megatron_core": _no_effect("It is read where megatron_config is set, which is refused."),
    "loftq_config": _no_effect(_BESIDE_INIT),
    "eva_config": _no_effect(_BESIDE_INIT),
    "corda_config": _no_effect(_BESIDE_INIT),
    "lora_ga_config": _no_effect(_BESIDE_INIT),
    "target_modules": _no_effect(_TENSORS_SAY),
    "exclude_modules": _no_effect(_TENSORS_SAY),
    "layers_to_transform": _no_effect(_TENSORS_SAY),
    "layers_pattern": _no_effect(_TENSORS_SAY),
    "fan_in_fan_out": _no_effect("It is for layers that store their weight transposed, as GPT-2's; PEFT resets it for others."),
    "lora_dropout": _no_effect("It is of the training."),
    "inference_mode": _no_effect("It says whether the factors are trained on."),
    "runtime_config": _no_effect("It says where PEFT computes."),
    "ensure_weight_tying": _no_effect("It is about tied embeddings, whose factors are refused."),
    "task_type": _no_effect("It says which of PEFT's wrappers the model was trained in."),
    "auto_mapping": _honoured("It names the class of the model: which text encoder a file is for."),
    "peft_version": _no_effect(_ORIGIN),
    "base_model_name_or_path": _no_effect(_ORIGIN),
    "revision": _no_effect(_ORIGIN),
}  # fmt: skip

_SHARED = (
    *("r", "rank_pattern", "alpha_pattern", "modules_to_save", "target_modules", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "inference_mode", "task_type", "auto_mapping", "peft_version"),
    *("base_model_name_or_path", "revision"),
)
_IN_SHAPES = "The shapes of the tensors say it."
_OF_TRAINING = "It is of the training."

LOHA_CONFIG: Mapping[str, Field] = {
    **{name: LORA_CONFIG[name] for name in _SHARED},
    "alpha": _honoured("The scale is alpha / r."),
    "peft_type": _honoured("It says which products the tensors are factors of."),
    "init_weights": _no_effect("Every way to begin leaves the model's weights as they are."),
    "use_effective_conv2d": _no_effect(_IN_SHAPES),
    "rank_dropout": _no_effect(_OF_TRAINING),
    "module_dropout": _no_effect(_OF_TRAINING),
}
"""The fields of LoHaConfig."""
LOKR_CONFIG: Mapping[str, Field] = {
    **LOHA_CONFIG,
    "decompose_both": _no_effect(_IN_SHAPES),
    "decompose_factor": _no_effect(_IN_SHAPES),
    "rank_dropout_scale": _no_effect(_OF_TRAINING),
}
"""The fields of LoKrConfig."""
CONFIGS: Mapping[str, Mapping[str, Field]] = {"LORA": LORA_CONFIG, "LOHA": LOHA_CONFIG, "LOKR": LOKR_CONFIG}
"""`peft_type` -> its fields, of the kinds that are merged."""
