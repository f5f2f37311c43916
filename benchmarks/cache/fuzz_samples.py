"""Files that `fuzz.py` mutates: a small checkpoint folder, a pipeline folder of its text encoder, LoRAs in three
styles.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.cache.fuzz_formats import write_format_samples
from sdflow.artifact import Artifact
from sdflow.build.assemble import assemble
from sdflow.digest import FileEntry, digest_file, digest_tree
from sdflow.manifest import Chain, FinishedPass, MergedLora, Origin, WrittenPass
from sdflow.passes.base import PassInputs
from sdflow.passes.onnx_conversion import OnnxConversion, OnnxConversionConfig
from sdflow.sources import PlainDigests, load_pipeline, open_checkpoint
from sdflow.sources.load import parameter_shapes

MODEL = "synthetic:sd15-tiny"


def make_samples(root: Path) -> None:
    """checkpoint/, pipeline/, loras/ and formats/ in `root`."""
    checkpoint = open_checkpoint(MODEL, digests=PlainDigests(), download=False)
    load_pipeline(checkpoint).save_pretrained(root / "checkpoint")
    load = checkpoint.submodels["text_encoder"].load
    built = root / "built"
    built.mkdir()
    facts = OnnxConversion().run(PassInputs("text_encoder", None, load), built, OnnxConversionConfig())
    entries = tuple(
        FileEntry(path.name, path.stat().st_size, digest_file(path))
        for path in sorted(built.iterdir())
        if path.is_file()
    )
    origin = Origin(
        name="small",
        target="cpu",
        model=MODEL,
        checkpoint=checkpoint.provenance,
        loras=(MergedLora("style.safetensors", None, "0" * 64, 0.5),),
        chains={
            "text_encoder": Chain(
                (WrittenPass("OnnxConversion", {"target_opset": 17}), WrittenPass("LoraMerge", {})),
                (FinishedPass("OnnxConversion", "0" * 64, {"target_opset": 17}, {"onnx": "1"}, facts),),
            )
        },
        generate={"steps": 20, "guidance_scale": 7.5, "scheduler": "euler"},
    )
    assemble(
        root / "pipeline",
        parts={"text_encoder": Artifact(digest_tree(entries), built, entries)},
        companions=checkpoint.companions,
        origin=origin,
        copy=True,
    )
    _write_loras(root / "loras", parameter_shapes("text_encoder", load))
    write_format_samples(root / "formats")


def _write_loras(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir()
    random = np.random.default_rng(0)
    layers = [
        key.removesuffix(".weight") for key in shapes if key.endswith(("q_proj.weight", "v_proj.weight", "fc1.weight"))
    ]
    kohya, peft, older = {}, {}, {}
    for layer in layers:
        out, into = shapes[f"{layer}.weight"]
        up, down = (random.standard_normal(size).astype(np.float32) for size in ((out, 2), (2, into)))
        whole = layer if layer.startswith("text_model.") else f"text_model.{layer}"
        name = f"lora_te_{whole.replace('.', '_')}"
        kohya |= {
            f"{name}.lora_up.weight": up,
            f"{name}.lora_down.weight": down,
            f"{name}.alpha": np.array(1.0, np.float32),
        }
        peft |= {f"text_encoder.{whole}.lora_B.weight": up, f"text_encoder.{whole}.lora_A.weight": down}
        older |= {
            f"text_encoder.{whole}.lora_linear_layer.up.weight": up,
            f"text_encoder.{whole}.lora_linear_layer.down.weight": down,
        }
    config = {
        "r": 2, "lora_alpha": 4, "peft_type": "LORA", "bias": "none", "use_rslora": False, "use_dora": False,
        "rank_pattern": {}, "alpha_pattern": {"q_proj": 1}, "target_modules": ["q_proj", "v_proj", "fc1"],
        "fan_in_fan_out": False, "init_lora_weights": True, "lora_dropout": 0.0, "modules_to_save": None,
    }  # fmt: skip
    said = {"lora_adapter_metadata": json.dumps({f"text_encoder.{name}": value for name, value in config.items()})}
    save_file(kohya, folder / "kohya.safetensors", {"ss_network_dim": "2", "ss_base_model_version": "sd_v1"})
    save_file(peft, folder / "peft.safetensors", {"format": "pt", **said})
    save_file(older, folder / "older.safetensors")
