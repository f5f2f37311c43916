"""The provenance beside a pipeline, by in-toto's own library and by hashing: what it names is what lies there and went in."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement
from safetensors.numpy import save_file
from small_lora import write_lora
from small_workflows import SMALL_PASSES, TESTS, Bench

from sdflow.config import load_workflow
from sdflow.errors import UsageError
from sdflow.manifest.provenance import PROVENANCE_FILE, require_provenance
from sdflow.passes import registry
from sdflow.run.options import RunOptions
from sdflow.run.run import run_workflow
from sdflow.sources import PlainDigests, load_pipeline, open_checkpoint
from sdflow.sources.licence import declared_licence
from sdflow.verify.folder.provenance import compare_with_provenance

CARD = "---\nlicense: creativeml-openrail-m\ntags:\n- art\n---\n# A model\nlicense: not this\n"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(bench: Bench) -> Path:
    workflow = load_workflow(bench.folder / "w.yaml", catalog=registry.catalog())
    options = RunOptions(bench.folder / "pipelines", bench.folder / "results")
    (result,) = run_workflow(workflow, bench.cache, options, bench.events).pipelines
    return result.folder


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("provenance")
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("PYTHONPATH", str(TESTS.parent))
        yield Bench(folder)


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    """Of the pipeline, to be changed."""
    return Path(shutil.copytree(built, tmp_path / "copy"))


@pytest.fixture(scope="module")
def built(bench: Bench) -> Path:
    """A pipeline of a checkpoint's folder that declares a licence, with a LoRA and a script of its own."""
    model = bench.folder / "model"
    load_pipeline(open_checkpoint("synthetic:sd15-tiny", digests=PlainDigests(), download=False)).save_pretrained(model)
    (model / "README.md").write_text(CARD)
    write_lora(bench.folder / "ink.safetensors")
    (bench.folder / "own.py").write_text(SMALL_PASSES.read_text())
    chain = [{"pass": "own.py:Convert", "text": "a"}, {"pass": "own.py:Merge"}]
    content: dict[str, Any] = {
        "model": "model",
        "target": "cpu",
        "submodels": {"unet": {"passes": chain}, "text_encoder": {"passes": chain}},
        "loras": [{"file": "ink.safetensors", "scale": 0.5}],
        "evaluate": {"image": None, "latency": None},
        "verify": False,
    }
    (bench.folder / "w.yaml").write_text(yaml.safe_dump(content))
    return run(bench)


def parsed(folder: Path) -> tuple[Statement, Any]:
    """By in-toto's library, which refuses what its schema does not have."""
    text = (folder / PROVENANCE_FILE).read_text()
    statement = Statement.copy_from_pb(json_format.Parse(text, statement_pb2.Statement()))
    statement.validate()
    predicate = json_format.ParseDict(json.loads(text)["predicate"], provenance_pb2.Provenance())
    return statement, predicate


def test_it_names_what_is_there_and_what_went_in(bench: Bench, built: Path) -> None:
    statement, predicate = parsed(built)
    assert statement.pb.predicate_type == "https://slsa.dev/provenance/v1"
    subjects = {each.name: each.digest["sha256"] for each in statement.pb.subject}
    names = {f"{place.name}/{path.name}" for place in built.iterdir() if place.is_dir() for path in place.iterdir()}
    assert set(subjects) == names | {"sdflow.json", "model_index.json"}
    assert {name: sha256(built / name) for name in subjects} == subjects

    definition, details = predicate.build_definition, predicate.run_details
    found = {each.name: each for each in definition.resolved_dependencies}
    assert found["LoRA/ink.safetensors"].digest["sha256"] == sha256(bench.folder / "ink.safetensors")
    assert found["workflow/w.yaml"].digest["sha256"] == sha256(bench.folder / "w.yaml")
    assert found["script/own.py"].digest["sha256"] == sha256(bench.folder / "own.py")
    weights = "unet/diffusion_pytorch_model.safetensors"
    assert found[f"model/{weights}"].digest["sha256"] == sha256(bench.folder / "model" / weights)
    assert found[f"model/{weights}"].annotations["license"] == "creativeml-openrail-m"
    manifest = json.loads((built / "sdflow.json").read_text())
    actions = json_format.MessageToDict(definition.internal_parameters)["actions"]
    assert {name: [step["action"] for step in chain] for name, chain in actions.items()} == {
        name: [step["action"] for step in each["steps"]] for name, each in manifest["submodels"].items()
    }
    assert details.builder.id == "urn:sdflow:local"
    assert details.metadata.started_on.seconds <= details.metadata.finished_on.seconds
    assert str(bench.folder) not in (built / PROVENANCE_FILE).read_text(), "it names no place of this machine"


def test_a_second_run_leaves_it_whenever_and_wherever_it_runs(
    bench: Bench, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (built / PROVENANCE_FILE).stat().st_mtime_ns
    monkeypatch.setenv("SDFLOW_BUILDER_ID", "https://example.org/builder")
    workflow = bench.folder / "w.yaml"
    workflow.write_text(workflow.read_text() + "# a word\n")
    assert run(bench) == built
    assert (built / PROVENANCE_FILE).stat().st_mtime_ns == before
    (built / PROVENANCE_FILE).unlink()
    assert list(compare_with_provenance(built, PlainDigests())) == [], "that of an earlier sdflow"
    with pytest.raises(UsageError, match="has no provenance"):
        require_provenance(built)
    run(bench)
    assert parsed(built)[1].run_details.builder.id == "https://example.org/builder"


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        (
            "tokenizer/tokenizer.json",
            lambda path: path.write_text(path.read_text() + " "),
            "is not the file that was built",
        ),
        ("model_index.json", lambda path: path.write_text(path.read_text() + " "), "is not the file that was built"),
        ("sdflow.json", lambda path: path.write_text(path.read_text().replace('"cpu"', '"cuda"')), "is not the file"),
        ("scheduler/scheduler_config.json", lambda path: path.unlink(), "is missing"),
        (PROVENANCE_FILE, lambda path: path.write_text("{"), "is not an in-toto statement"),
        (
            PROVENANCE_FILE,
            lambda path: path.write_text(path.read_text().replace('"unet/', '"../unet/')),
            "is not a file in the folder",
        ),
    ],
)
def test_what_has_changed_since_is_named(copy: Path, name: str, change: Callable[[Path], Any], says: str) -> None:
    assert list(compare_with_provenance(copy, PlainDigests())) == []
    change(copy / name)
    (finding,) = compare_with_provenance(copy, PlainDigests())
    assert (finding.level, finding.node) == ("error", name) and says in finding.what


@pytest.mark.parametrize(
    "predicate", [{}, {"buildDefinition": {}}, {"buildDefinition": {"buildType": "urn:other"}}, None, [], "x"]
)
def test_a_statement_of_another_program_is_told(copy: Path, predicate: Any) -> None:
    statement = json.loads((copy / PROVENANCE_FILE).read_text())
    (copy / PROVENANCE_FILE).write_text(json.dumps({**statement, "predicate": predicate}))
    with pytest.raises(UsageError, match=PROVENANCE_FILE):
        require_provenance(copy)


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        (CARD, "creativeml-openrail-m"),
        ("---\nlicense: other\nlicense_name: flux-1-dev\n---\n", "flux-1-dev"),
        ('---\r\nlicense: "mit"\r\n---\r\n', "mit"),
        ("license: mit\n", None),
        ("---\ntags: [a]\n---\nlicense: mit\n", None),
        ("", None),
    ],
)
def test_the_licence_is_the_declared_one(tmp_path: Path, card: str, licence: str | None) -> None:
    assert declared_licence(tmp_path) is None
    (tmp_path / "README.md").write_bytes(card.encode())
    assert declared_licence(tmp_path) == licence
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "ink.safetensors", {"modelspec.license": "CC0-1.0"})
    assert declared_licence(tmp_path / "ink.safetensors") == "CC0-1.0"
