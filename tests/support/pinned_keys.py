"""What the cache keys of small pipelines are made of, but for what changes from one machine to the next.

A key holds versions of packages, and from the second step on the digest of what was built before. Here the packages'
names stand in place of their versions, and a digest made of the step's place in place of the artifact's. So everything
can be known without a build, and does not change with an update of a package.

`python -m tests.support.pinned_keys` writes tests/data/pinned_keys.json anew, after a change of the keys that is meant.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from sdflow.artifact import INDEX_FILE, Action, Artifact, Record
from sdflow.build.plan import PipelinePlan, make_plan
from sdflow.config import load_workflow
from sdflow.config.workflow import VerifySpec
from sdflow.digest import digest_json
from sdflow.manifest import MANIFEST_FILE, Chain, Manifest, Origin, Part, as_bytes
from sdflow.passes import registry
from sdflow.store import Cache
from sdflow.targets import TARGETS
from sdflow.verify import Subject, own_image, verify

ROOT = Path(__file__).parents[2]
PINNED = Path(__file__).parents[1] / "data/pinned_keys.json"
TINY = """\
# Every fusion, though CUDA's kernels are not for models this narrow: no graph is made here.
extends: base/stable_diffusion_1.yaml
model: synthetic:sd15-tiny
target: cpu
evaluate: {latency: {warmup: 1, runs: 3}, image: {steps: 2, height: 64, width: 64}}
"""
LORAS = [ROOT / "samples/loras/stripes.safetensors", ROOT / "samples/loras/outline.safetensors"]
UNET_ALONE = tuple(
    f"submodels.{name}=null" for name in ("text_encoder", "vae_encoder", "vae_decoder", "safety_checker")
)
USER_PASS = """\
from sdflow.passes.base import Pass, PassConfig

class Config(PassConfig):
    keep: int = 3

class Mine(Pass[Config]):
    name, version, uses = "Mine", 4, ("onnx",)
    Config = Config

    def run(self, inputs, out, config):
        raise NotImplementedError
"""
PASSES_OF_ALL_KINDS = """\
model: synthetic:sd15-tiny
target: cpu
submodels:
  unet:
    passes:
      - {pass: OnnxConversion, target_opset: 17}
      - {pass: mine.py, keep: 5}
      - {pass: OnnxPeepholeOptimizer}
verify: false
evaluate: {latency: null, image: null}
"""


def contents_now(folder: Path) -> dict[str, dict[str, Any]]:
    """Case -> name of the action -> its content. folder: empty, for files that are needed on the way."""
    (folder / "mine.py").write_text(USER_PASS)
    (folder / "kinds.yaml").write_text(PASSES_OF_ALL_KINDS)
    (tiny := folder / "tiny_cpu.yaml").write_text(TINY)
    cache = Cache(folder / "cache", salt="a salt")
    loras = f"loras={json.dumps([{'file': str(path), 'scale': 0.5} for path in LORAS])}"
    cases: dict[str, dict[str, Any]] = {}
    for target in TARGETS:
        for also, overrides in {"": (), " with LoRAs": (loras,)}.items():
            # The pinned LoRAs were made for the shapes: what a key holds of them is their bytes and scales.
            with mock.patch("sdflow.sources.require_made_for"):
                plan = _plan(tiny, cache, f"target={target}", *overrides)
            cases[f"tiny, {target}{also}"] = _steps(plan) | _verification(plan, folder)
    cases["shapes"] = _steps(plan := _plan(ROOT / "workflows/shapes_cpu.yaml", cache)) | _verification(plan, folder)
    sd3 = _plan(Path("sd35_tiny"), cache, "target=cuda")
    cases["Stable Diffusion 3.5, cuda"] = _steps(sd3) | _verification(sd3, folder)
    sdxl = ("target=cuda", "model=synthetic:sdxl-tiny", "verify=false", "evaluate.image=null", *UNET_ALONE)
    cases["the UNet of SDXL, cuda"] = _steps(_plan(tiny, cache, *sdxl))
    cases["a script and a pass of Olive's"] = _steps(_plan(folder / "kinds.yaml", cache))
    return cases


def pinned_contents() -> dict[str, dict[str, Any]]:
    """The same, as it was written down."""
    stored = json.loads(PINNED.read_text(encoding="utf-8"))
    return {
        case: {name: stored["contents"][digest] for name, digest in actions.items()}
        for case, actions in stored["actions"].items()
    }


def differences(before: Any, after: Any, at: str = "") -> Iterator[str]:
    """Every value of two JSON documents that differs, with its place."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted({*before, *after}):
            yield from differences(before.get(key, "nothing"), after.get(key, "nothing"), f"{at}/{key}")
    elif before != after:
        yield f"{at}: {before} -> {after}"


def _plan(workflow: Path, cache: Cache, *overrides: str) -> PipelinePlan:
    (plan,) = make_plan(load_workflow(workflow, catalog=registry.catalog(), overrides=overrides), cache).pipelines
    return plan


def _steps(plan: PipelinePlan) -> dict[str, Any]:
    found = {}
    for chain in plan.chains:
        for weights, steps in (("", chain.steps), ("carried ", chain.carried)):
            for step in steps:
                before = digest_json(["before", weights, chain.submodel, step.index]) if step.index else None
                found[f"{weights}{chain.submodel}/{step.index}"] = _without_versions(step.action(before, "a salt"))
    return found


def _verification(plan: PipelinePlan, folder: Path) -> dict[str, Any]:
    """What `verify` asks the cache for: the reference, and the verification itself."""
    assert plan.checkpoint is not None
    pipeline = folder / "pipelines" / plan.pipeline.target
    chains = {chain.submodel: Chain(None, ()) for chain in plan.chains}
    for name in chains:
        (pipeline / name).mkdir(parents=True, exist_ok=True)
        (pipeline / name / "model.onnx").write_text(name)
    origin = Origin("tiny", plan.pipeline.target, chains=chains)
    manifest = Manifest(origin, {name: Part(digest_json(name), ()) for name in chains}, ())
    (pipeline / MANIFEST_FILE).write_bytes(as_bytes(manifest))
    (pipeline / INDEX_FILE).write_text("{}")
    image = plan.pipeline.evaluate.image or own_image(plan.pipeline.model)
    subject = Subject("tiny", plan.pipeline.target, pipeline, plan.checkpoint, plan.loras, image=image)
    found = {}
    for level in ("quick", "full"):
        cache = _AskedCache(folder / "asked", salt="a salt")
        try:
            verify(subject, replace(VerifySpec(), level=level), cache)
        except _EverythingAsked:
            for action in cache.asked:
                found[f"{action.content['pass']['name']}, {level}"] = _without_versions(action)
    return found


class _EverythingAsked(Exception):
    pass


class _AskedCache(Cache):
    """A cache that has every reference, notes what it is asked for, and ends there."""

    def __init__(self, root: Path, *, salt: str) -> None:
        super().__init__(root, salt=salt)
        self.asked: list[Action] = []

    def lookup(self, action: Action) -> Record:
        self.asked.append(action)
        if action.content["pass"]["name"] == "VerifyReference":
            return Record(action, Artifact(digest_json("the reference"), self.root, ()), {}, {})
        raise _EverythingAsked


def _without_versions(action: Action) -> dict[str, Any]:
    content = json.loads(json.dumps(action.content))
    if "manifest" in content["inputs"]:  # the one written above, of whatever form manifests have today
        content["inputs"]["manifest"] = "the digest of sdflow.json"
    return {**content, "uses": sorted(content["uses"])}


def write(cases: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Each content once, under its digest; actions say which is theirs."""
    contents: dict[str, Any] = {}
    actions: dict[str, dict[str, str]] = {}
    for case, found in cases.items():
        for name, content in found.items():
            contents[digest_json(content)] = content
            actions.setdefault(case, {})[name] = digest_json(content)
    lines = [f"  {json.dumps(digest)}: {json.dumps(contents[digest], sort_keys=True)}" for digest in sorted(contents)]
    text = json.dumps(actions, indent=2, ensure_ascii=False)
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{{"actions": {text},\n"contents": {{\n' + ",\n".join(lines) + "\n}}\n", encoding="utf-8")


def digests(cases: Mapping[str, Mapping[str, Any]]) -> Sequence[tuple[str, str, str]]:
    """(case, name, digest) of every action."""
    return [(case, name, digest_json(content)) for case, found in cases.items() for name, content in found.items()]


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        write(contents_now(Path(scratch)), PINNED)
