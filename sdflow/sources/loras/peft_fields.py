"""Every field of PEFT's LoraConfig, and what sdflow makes of it: honoured, refused by name, or without effect on a merge.

A test holds the table to the PEFT that is installed: a field that is new there fails it until it is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Decision = Literal["honoured", "refused", "without effect"]


@dataclass(frozen=True)
class Field:
    """A field of LoraConfig. plain: of one that is refused, the values besides null that make of the tensors nothing else than
    scale * up @ down. merges: of one that is refused, whether PEFT can merge such an adapter into the weights."""

    decision: Decision
    why: str
    plain: tuple[Any, ...] = ()
    merges: bool = True


def _honoured(why: str) -> Field:
    return Field("honoured", why)


def _refused(why: str, *plain: Any) -> Field:
    return Field("refused", why, plain)


def _unmergeable(why: str) -> Field:
    return Field("refused", why, merges=False)


def _no_effect(why: str) -> Field:
    return Field("without effect", why)


_TENSORS_SAY = "Which modules are changed, the names of the tensors say."
_ORIGIN = "It says where the model or the file is from."
_BESIDE_INIT = "It is read by a way to begin that init_lora_weights names, and that is refused there where it matters."

LORA_CONFIG: Mapping[str, Field] = {
    "r": _honoured("The rank: the tensors must have it."),
    "lora_alpha": _honoured("The scale is alpha / r."),
    "rank_pattern": _honoured("Ranks by the names of modules; the first pattern that fits counts."),
    "alpha_pattern": _honoured("Alphas by the names of modules; the first pattern that fits counts."),
    "use_rslora": _honoured("The scale is alpha / sqrt(r): https://arxiv.org/abs/2312.03732."),
    "peft_type": _refused("LoHa, LoKr, OFT and others are other products of other tensors.", "LORA"),
    "use_dora": _refused("DoRA scales the columns of the merged weight: https://arxiv.org/abs/2402.09353.", False),
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
