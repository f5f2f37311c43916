"""Pipeline folders of small files, as a run leaves them: their provenance names every file."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from converted import artifact_of

from sdflow.build.assemble import assemble
from sdflow.build.pipeline_folder import Layout
from sdflow.manifest import Origin
from sdflow.manifest.provenance import SLSA, STATEMENT


def statement(layout: Layout) -> bytes:
    """Of in-toto, with the files of the submodels alone."""
    subject = [
        {"name": f"{name}/{each.path}", "digest": {"sha256": each.sha256}}
        for name, part in layout.parts.items()
        for each in part.files
    ]
    subject += [
        {"name": name, "digest": {"sha256": sha256(content).hexdigest()}} for name, content in layout.described.items()
    ]
    content = {"_type": STATEMENT, "predicateType": SLSA, "subject": subject, "predicate": {"any": 1}}
    return json.dumps(content).encode()


def make_pipeline(folder: Path, *, unet: bytes = b"base", name: str = "fox", size: int = 5000) -> Path:
    """pipelines/NAME with links into a cache. unet: what its weights are made of; those of the others are always the same."""
    contents = {"text_encoder": b"text", "unet": unet, "vae_decoder": b"vae"}
    companions = {"tokenizer": "vocab.json", "scheduler": "scheduler_config.json"}
    for submodel, content in contents.items():
        place = folder / "cache" / name / submodel
        place.mkdir(parents=True)
        (place / "model.onnx").write_bytes(b"graph of " + submodel.encode())
        (place / "model.onnx.data").write_bytes(content * size)
        (place / "config.json").write_text(json.dumps({"of": submodel}))
    for companion, file in companions.items():
        (folder / "checkpoint" / companion).mkdir(parents=True, exist_ok=True)
        (folder / "checkpoint" / companion / file).write_text('{"_class_name": "DDIMScheduler"}')
    out = folder / "pipelines" / name
    assemble(
        out,
        parts={submodel: artifact_of(folder / "cache" / name / submodel) for submodel in contents},
        companions={companion: folder / "checkpoint" / companion for companion in companions},
        origin=Origin(name, "cpu"),
        provenance=statement,
    )
    return out


def content_of(folder: Path) -> dict[str, bytes]:
    """File -> content, through links."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            found |= {f"{path.name}/{name}": content for name, content in content_of(path).items()}
        else:
            found[path.name] = path.read_bytes()
    return found
