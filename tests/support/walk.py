"""A walk through every family, every addition and every source, derived from the families' table.

A row is a pipeline: a family from one source, with additions that each come from a source too. It is built by the shortest chains
of passes, verified, put together and drawn, and the image is held to that of diffusers' own pipeline, which reads the weights
from a folder by `from_pretrained`: nothing that sdflow reads takes part in it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import yaml
from beside_diffusers import PROMPT, SIZE, assert_equal, generator, pattern
from ip_adapter_files import save_adapter, save_encoder, tensors
from original_layout import (
    flux_tensors,
    mmdit_tensors,
    refiner_of_xl,
    stable_diffusion_1,
    stable_diffusion_2,
    stable_diffusion_3,
    stable_diffusion_xl,
    unet_tensors,
    vae_tensors,
)
from safetensors.torch import save_file
from z_image_layout import z_image_tensors

from sdflow.config import load_workflow
from sdflow.families import COMPONENT_ARCHITECTURES, FAMILIES
from sdflow.families.shared.base import Family
from sdflow.models.controlnet import ControlNet
from sdflow.passes import registry
from sdflow.run.options import RunOptions
from sdflow.run.run import run_workflow
from sdflow.runtime.ensemble import Ensemble
from sdflow.runtime.files.folder import refiner_of
from sdflow.runtime.pipeline import Pipeline
from sdflow.sources import PlainDigests, load_module, load_pipeline, open_checkpoint
from sdflow.sources.architectures import architecture_config
from sdflow.store import Cache
from tests.sources.hub_cache import COMMIT, cached_repository
from tests.support.small_workflows import Events

SOURCES = ("folder", "file", "hub", "synthetic")
NET, ADAPTER, REFINER = "ControlNet", "IP-Adapter", "refiner"
SEED = 5
"""Of what takes the place of a checkpoint's own component."""
DRAW: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": 3.0, "output_type": "np"}
"""More guidance would multiply rounding: at 7.5, diffusers' own float32 is 8e-4 from its float64 with these random weights."""
PASSES = [{"pass": "OnnxConversion", "target_opset": 17}]


def tiny(family: Family) -> str:
    """The small architecture of a family."""
    return next(name for name in family.architectures if name.endswith("-tiny"))


def refiner(family: Family) -> Family | None:
    """The family that goes on from this one's latents: it has some of its parts, and no others."""
    return next(
        (each for each in FAMILIES.values() if set(each.submodels) < set(family.submodels) and each.lacks), None
    )


def alone() -> dict[str, str]:
    """The small architectures of a component alone -> the component."""
    return {name: component for name, component in COMPONENT_ARCHITECTURES.items() if name.endswith("-tiny")}


def additions(family: Family) -> tuple[tuple[str, ...], ...]:
    """What can be added to a family, in groups that go together."""
    together = [NET] if family.net is not None else []
    together += [ADAPTER] if family.prompter is not None else []
    together += family.exchangeable
    groups = [tuple(together), *((name,) for name in alone() if _same_latents(name, family))]
    return (*groups, (REFINER,)) if refiner(family) is not None else tuple(groups)


def sources(family: Family) -> tuple[str, ...]:
    """Where a family's checkpoint can be from: no single file where drawing needs a tokenizer that none brings."""
    brought = [each for each in family.companions.values() if not each.shipped]
    whole = all(each.parts and all(family.part(part).optional for part in each.parts) for each in brought)
    return SOURCES if whole else tuple(source for source in SOURCES if source != "file")


def _same_latents(alone: str, family: Family) -> bool:
    """Whether a component that has an architecture alone, a VAE, has this family's latents."""
    component = COMPONENT_ARCHITECTURES[alone]
    own, other = architecture_config(tiny(family), component), architecture_config(alone, component)
    return bool(own["latent_channels"] == other["latent_channels"])


def _without_tokenizers(family: Family) -> list[str]:
    """The components that a single file cannot bring, as it has no tokenizers, and these."""
    found = [(name, each.parts) for name, each in family.companions.items() if not each.shipped]
    return [each for name, parts in found for each in (name, *(family.part(part).component for part in parts))]


@dataclass(frozen=True)
class Row:
    """A pipeline: its family, where that is from, and what is added -> where that is from."""

    family: str
    source: str
    added: tuple[tuple[str, str], ...]

    @property
    def pairs(self) -> frozenset[tuple[str, ...]]:
        """What it shows: the family and its source, each addition in the family, and each addition's source."""
        found = {("from", self.family, self.source)}
        for addition, source in self.added:
            found |= {("with", self.family, addition), ("added", addition, source)}
        return frozenset(found)

    @property
    def words(self) -> frozenset[str]:
        """Its family, its additions and every source in it, each alone."""
        return frozenset((self.family, self.source, *(word for pair in self.added for word in pair)))

    def __str__(self) -> str:
        return ", ".join([f"{self.family} {self.source}", *(f"{name} {source}" for name, source in self.added)])


IN_ITS_OWN_JOB = ("flux2",)
"""Families whose VAE does not come as a file of its own: `tests/jobs/test_flux2_job.py`."""


SHOWN_ELSEWHERE = (
    *("flux", "stable_diffusion_3", "z_image", "transformer", "stable_diffusion_xl_refiner"),
    *("latent_consistency", "taesd-tiny"),
)
"""What `fewest_rows` need not show: families that a job in `tests/jobs/` takes from a folder to diffusers' own image by default,
the transformer of another (`test_flux_job.py`: from a GGUF file), the refiner, which is built as an addition to XL, and latent
consistency models and TAESD, whose images `tests/runtime/test_few_steps.py` and `test_vae_tiny.py` hold to diffusers'."""


def every_row() -> Iterator[Row]:
    """The whole product, but for the additions of one group: these turn through the sources side by side."""
    for family in FAMILIES.values():
        if family.name in IN_ITS_OWN_JOB:
            continue
        for group, source, turn in product(additions(family), sources(family), range(len(SOURCES))):
            turned = ((name, SOURCES[(index + turn) % len(SOURCES)]) for index, name in enumerate(group))
            yield Row(family.name, source, tuple(turned))


def pairs_of(rows: Iterable[Row]) -> frozenset[tuple[str, ...]]:
    return frozenset().union(*(row.pairs for row in rows))


@cache
def few_rows() -> tuple[Row, ...]:
    """So few rows that each pair of the product is in one: the row that shows most of what is left, again and again."""
    left, chosen, rows = set(pairs_of(every_row())), [], list(every_row())
    while left:
        best = max(rows, key=lambda row: len(row.pairs & left))
        chosen.append(best)
        left -= best.pairs
    return tuple(chosen)


def fewest_rows() -> tuple[Row, ...]:
    """Of `few_rows`, so few that each family, each source and each addition is in one; the others are slow tests."""
    left, chosen = {one for row in few_rows() for one in row.words}.difference(SHOWN_ELSEWHERE), []
    while left:
        best = max(few_rows(), key=lambda row: len(row.words & left))
        chosen.append(best)
        left -= best.words
    return tuple(chosen)


@dataclass
class Written:
    """Checkpoints and additions as diffusers saves them, as single files, and in a local cache of the hub."""

    root: Path
    hub: Path
    _made: set[Path] = field(default_factory=set)

    def model(self, family: str, source: str) -> str:
        """What a workflow names for the checkpoint of a family."""
        architecture = tiny(FAMILIES[family])
        if source == "synthetic":
            return f"synthetic:{architecture}"
        folder, file = self.folder(family), self.root / f"{family}.safetensors"
        if source == "file" and self._new(file):
            pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
            texts = [each for name in ("text_encoder", "text_encoder_2") if (each := getattr(pipeline, name, None))]
            denoiser = getattr(pipeline, FAMILIES[family].part(FAMILIES[family].denoiser).component)
            save_file(_single_file(family, [denoiser, pipeline.vae, *texts]), file)
        return self._place(folder, file, source)

    def folder(self, family: str) -> Path:
        """The checkpoint as diffusers saves it."""
        folder = self.root / family
        if self._new(folder):
            load_pipeline(_opened(tiny(FAMILIES[family]))).save_pretrained(folder)
        return folder

    def component(self, family: str, addition: str, source: str) -> str:
        """What a workflow names for an addition that is a network of diffusers: a ControlNet, a VAE or a UNet."""
        reference = self._reference(family, addition)
        folder = self.module(family, addition)
        file = folder.with_suffix(".safetensors")
        if source == "file" and self._new(file):
            module = getattr(diffusers, self._class(family, addition)).from_pretrained(folder)
            tensors = _in_a_file(family, addition, module)
            save_file({name: each.detach().contiguous() for name, each in tensors.items()}, file)
        return reference if source == "synthetic" else self._place(folder, file, source)

    def module(self, family: str, addition: str) -> Path:
        """The same as diffusers saves it."""
        folder = self.root / f"{family}-{addition}"
        if self._new(folder):
            if addition == NET:
                checkpoint = _opened(tiny(FAMILIES[family]), nets={"net": self._reference(family, addition)})
                name = FAMILIES[family].net_name("net")
            else:
                component = alone().get(addition, addition)
                checkpoint = _opened(tiny(FAMILIES[family]), components={component: self._reference(family, addition)})
                name = next(part.name for part in FAMILIES[family].components[component])
            load_module(name, checkpoint.submodels[name].load).save_pretrained(folder)
        return folder

    def adapter(self, family: str, source: str) -> dict[str, str]:
        """What a workflow names for an IP-Adapter, with the image encoder that lies beside it."""
        if source == "synthetic":
            return {"file": "synthetic:ip-adapter-tiny"}
        folder = self.adapters(family)
        if source == "hub":
            return {"file": self._place(folder, folder, "hub"), "weight_name": "models/plain.safetensors"}
        name = "models/plain.bin" if source == "file" else "models/plain.safetensors"
        return {"file": str(folder / name)} if source == "file" else {"file": str(folder), "weight_name": name}

    def adapters(self, family: str) -> Path:
        folder = self.root / f"{family}-adapters"
        if self._new(folder):
            (folder / "models").mkdir(parents=True)
            save_encoder(folder / "models/image_encoder")
            for name in ("plain.safetensors", "plain.bin"):
                save_adapter(folder / "models" / name, tensors(tiny(FAMILIES[family])))
        return folder

    def _reference(self, family: str, addition: str) -> str:
        return f"synthetic:{addition if addition in alone() else tiny(FAMILIES[family])}?seed={SEED}"

    def _class(self, family: str, addition: str) -> str:
        if addition == NET:
            return "ControlNetModel"
        if addition in alone():
            return "AutoencoderTiny"
        return FAMILIES[family].components[addition][0].model.class_name

    def _place(self, folder: Path, file: Path, source: str) -> str:
        if source == "file":
            return str(file)
        if source == "folder":
            return str(folder)
        if self._new(self.hub / folder.name):
            repository = cached_repository(self.hub, f"owner/{folder.name}")
            _as_the_hub_keeps_it(folder, repository)
        return f"hf:owner/{folder.name}"

    def _new(self, place: Path) -> bool:
        new = place not in self._made
        self._made.add(place)
        return new


@contextmanager
def written_in(root: Path) -> Iterator[Written]:
    """Checkpoints under a folder, with a cache of the hub there."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root / "hub"))
        yield Written(root / "places", root / "hub")


def _opened(architecture: str, **more: Any) -> Any:
    return open_checkpoint(f"synthetic:{architecture}", digests=PlainDigests(), download=False, **more)


def _as_the_hub_keeps_it(folder: Path, repository: Path) -> None:
    """Files of a snapshot are links to blobs."""
    (repository / "blobs").mkdir()
    for index, path in enumerate(sorted(each for each in folder.rglob("*") if each.is_file())):
        blob = repository / "blobs" / f"{index:040x}"
        shutil.copy(path, blob)
        link = repository / "snapshots" / COMMIT / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)


def _single_file(family: str, parts: list[Any]) -> dict[str, torch.Tensor]:
    """In the original layout. The refiner has XL's second text encoder alone."""
    if FAMILIES[family].lacks:
        return refiner_of_xl(*parts)
    if family == "stable_diffusion_3":
        return stable_diffusion_3(*parts)
    if len(parts) == 4:
        return stable_diffusion_xl(*parts)
    return (stable_diffusion_2 if parts[2].config.hidden_act == "gelu" else stable_diffusion_1)(*parts)


def _in_a_file(family: str, addition: str, module: Any) -> dict[str, torch.Tensor]:
    """A network in a file of its own, by the original names where it has some."""
    if family == "z_image" and addition == "transformer":
        return {f"model.diffusion_model.{name}": value for name, value in z_image_tensors(module).items()}
    if addition == NET:
        state = module.state_dict()
        names = ControlNet().original_names(state)
        return {f"control_model.{names[key].name}": value for key, value in state.items()}
    if addition == "vae":
        return vae_tensors(module)
    if addition == "transformer":
        of_flux = type(module) is diffusers.FluxTransformer2DModel
        original = (flux_tensors if of_flux else mmdit_tensors)(module)
        return {f"model.diffusion_model.{name}": value for name, value in original.items()}
    if addition == "unet":
        return {f"model.diffusion_model.{name}": value for name, value in unet_tensors(module).items()}
    return dict(module.state_dict())


# Ours


def build(row: Row, written: Written, place: Path, store: Cache) -> Path:
    """The pipeline of a row, verified: it would not be put together otherwise."""
    family = FAMILIES[row.family]
    content: dict[str, Any] = {"model": written.model(row.family, row.source), "target": "cpu", "allow_pickle": True}
    content["submodels"] = {name: {"passes": PASSES} for name in family.submodels}
    for addition, source in row.added:
        if addition == NET:
            content["controlnets"] = {"net": written.component(row.family, addition, source)}
            content["submodels"][family.net.name] = {"passes": PASSES}  # type: ignore[union-attr]
        elif addition == ADAPTER:
            content["ip_adapters"] = [written.adapter(row.family, source)]
            content["submodels"][family.prompter.name] = {"passes": PASSES}  # type: ignore[union-attr]
        elif addition == REFINER:
            content["refiner"] = written.model(refiner(family).name, source)  # type: ignore[union-attr]
        else:
            components = content.setdefault("components", {})
            components[alone().get(addition, addition)] = written.component(row.family, addition, source)
    content |= {
        "verify": {"level": "quick", "height": SIZE, "width": SIZE},
        "evaluate": {"image": None, "latency": None},
    }
    path = place / "row.yaml"
    path.write_text(yaml.safe_dump(content))
    options = RunOptions(out=place / "pipelines", results=place / "results")
    run_workflow(load_workflow(path, catalog=registry.catalog()), store, options, Events())
    return place / "pipelines/row"


def draw(row: Row, folder: Path) -> Any:
    """One image of the built pipeline."""
    drawer: Any = Ensemble.of_folder(folder, "cpu", threads=1)
    given: dict[str, Any] = {**DRAW, "generator": generator()}
    if FAMILIES[row.family].lacks:
        return drawer(PROMPT, _latents(), strength=0.6, **given).images
    given |= {"height": SIZE, "width": SIZE}
    if refiner_of(folder) is not None:
        return drawer(PROMPT, refiner_start=0.5, **given).images
    assert isinstance(drawer, Pipeline)
    added = dict(row.added)
    if NET in added:
        given["control"] = {"net": pattern(1)}
    if added.get(ADAPTER, "synthetic") != "synthetic":
        given |= {"ip_adapter_image": pattern(2), "ip_adapter_scale": 0.7}
    return drawer(PROMPT, **given).images


# diffusers'


def expected(row: Row, written: Written) -> Any:
    """The image of diffusers' own pipeline, from folders that its `save_pretrained` wrote."""
    added = dict(row.added)
    parts: dict[str, Any] = {}
    if row.source == "file":
        parts |= dict.fromkeys(_without_tokenizers(FAMILIES[row.family]))
    for addition in added:
        if addition in FAMILIES[row.family].exchangeable or addition in alone():
            kind = getattr(diffusers, written._class(row.family, addition))
            module = kind.from_pretrained(written.module(row.family, addition))
            parts[alone().get(addition, addition)] = module
    theirs: Any = diffusers.DiffusionPipeline.from_pretrained(written.folder(row.family), **parts)
    if row.source == "file" and row.family == "stable_diffusion_3":
        torch.nn.init.eye_(theirs.text_encoder.text_projection.weight)  # the original layout goes without it
    given: dict[str, Any] = {**DRAW, "generator": generator()}
    family = FAMILIES[row.family]
    denoiser = architecture_config(tiny(family), family.part(family.denoiser).component)
    given |= family.reference_arguments_of({family.denoiser: denoiser})
    if NET in added:
        net = diffusers.ControlNetModel.from_pretrained(written.module(row.family, NET))
        kind = type(theirs).__name__.removesuffix("Pipeline")
        theirs = getattr(diffusers, f"{kind}ControlNetPipeline")(**theirs.components, controlnet=net)
        given |= {"image": pattern(1), "controlnet_conditioning_scale": 1.0}
    if added.get(ADAPTER, "synthetic") != "synthetic":
        theirs.load_ip_adapter(
            str(written.adapters(row.family)), subfolder="models", weight_name="plain.safetensors",
            image_encoder_folder="image_encoder",
        )  # fmt: skip
        theirs.set_ip_adapter_scale(0.7)
        given["ip_adapter_image"] = pattern(2)
    theirs.set_progress_bar_config(disable=True)
    if FAMILIES[row.family].lacks:
        return theirs(prompt=PROMPT, image=_latents(), strength=0.6, **given).images
    given |= {"height": SIZE, "width": SIZE}
    if REFINER not in added:
        return theirs(prompt=PROMPT, **given).images
    latents = theirs(prompt=PROMPT, denoising_end=0.5, **{**given, "output_type": "latent"}).images
    other = refiner(FAMILIES[row.family])
    assert other is not None
    second: Any = diffusers.DiffusionPipeline.from_pretrained(written.folder(other.name))
    second.set_progress_bar_config(disable=True)
    more = {name: given[name] for name in (*DRAW, "generator")}
    return second(PROMPT, image=latents, denoising_start=0.5, **more).images


def _latents() -> torch.Tensor:
    return torch.randn(1, 4, SIZE // 8, SIZE // 8, generator=torch.Generator().manual_seed(1))


def walk(row: Row, written: Written, place: Path, store: Cache) -> None:
    """Build a row's pipeline, verify it, and hold its image to diffusers'."""
    assert_equal(draw(row, build(row, written, place, store)), expected(row, written))
