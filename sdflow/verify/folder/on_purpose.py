"""The one table of what an assembled folder has on purpose otherwise than its checkpoint, with the reason for each row.

What no row names is as in the checkpoint. `expected` says what stands in place of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Value = Literal[
    "left out",
    "anything",
    "an ONNX model",
    "nothing",
    "the class for ONNX graphs",
    "the class that loads it",
    "whether the filter is there",
    "the checkpoint's, or diffusers' default",
    "what the family sets",
    "the said scheduler's",
]


@dataclass(frozen=True)
class Row:
    """A difference that is meant.

    file: of the folder. key: of its JSON, a pattern of fnmatch; empty for the file as a whole. Words in <> stand for names of
    the pipeline: <submodel> for each that it has, <companion> for what lies beside them, <scheduler> for the one with the
    steps, <absent> for components that its class may have and it has not, <option> for the entries that its family reads, <set>
    for the entries that its family sets. value: what belongs there. why: the reason.
    """

    file: str
    key: str
    value: Value
    why: str


ON_PURPOSE: tuple[Row, ...] = (
    Row(
        "model_index.json",
        "_class_name",
        "the class for ONNX graphs",
        "The checkpoint's class runs modules of PyTorch; by this one diffusers and optimum know a folder of ONNX graphs.",
    ),
    Row("model_index.json", "_diffusers_version", "anything", "It says who wrote the file, not what is in the folder."),
    Row(
        "model_index.json",
        "<submodel>",
        "an ONNX model",
        "The graph stands in place of the module. A VAE becomes two graphs, with a name each.",
    ),
    Row(
        "model_index.json",
        "<companion>",
        "the class that loads it",
        "Old checkpoints name classes that transformers 5 no longer has, and a scheduler's own config names its class, which "
        "may be another where a LoRA or the workflow asks for it.",
    ),
    Row(
        "model_index.json",
        "<absent>",
        "nothing",
        "diffusers asks its class for every component: what is not there is said to be none.",
    ),
    Row(
        "model_index.json",
        "requires_safety_checker",
        "whether the filter is there",
        "A workflow may leave out the filter of images, and diffusers warns where one is required and not there.",
    ),
    Row(
        "model_index.json",
        "<option>",
        "the checkpoint's, or diffusers' default",
        "Entries that change what is computed are written down also where the checkpoint leaves them to diffusers.",
    ),
    Row(
        "model_index.json",
        "*",
        "left out",
        "Components of PyTorch whose graphs have other names, those that no pipeline here has (an image encoder), the "
        "watermark, and where the checkpoint once lay.",
    ),
    *(
        Row(
            "<submodel>/config.json",
            key,
            "left out",
            "It says who wrote the file, or where it lay; not what the model is.",
        )
        for key in ("_diffusers_version", "_name_or_path", "transformers_version")
    ),
    Row(
        "<submodel>/config.json",
        "<set>",
        "what the family sets",
        "It chooses the inputs and outputs of the graph: the layers of a text encoder that are read, what ControlNets give, the "
        "tokens of IP-Adapters.",
    ),
    Row(
        "<scheduler>",
        "*",
        "the said scheduler's",
        "A LoRA or a checkpoint for few steps, or the workflow, asks for another scheduler, with the same noise schedule.",
    ),
    Row(
        "<companion>/*",
        "",
        "left out",
        "Only files that the libraries read are copied: of a stranger's folder nothing else goes on.",
    ),
)
"""The first row that fits a file and a key counts."""
