"""Structures to take along: from a machine that has everything to one that has neither torch nor olive-ai nor diffusers."""

from __future__ import annotations

import io
import json
import subprocess
import venv
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked_workers import forking
from light_install import HEAVY, ROOT, LightInstall, light_install
from original_layout import original_layout
from safetensors.torch import save_file
from small_lora import write_lora
from small_workflows import TESTS, Events
from started_python import StartedPython

from sdflow import __version__
from sdflow.artifact import Action
from sdflow.build import imported
from sdflow.build.plan import make_plan
from sdflow.config import load_workflow
from sdflow.digest import FileEntry, digest_tree
from sdflow.errors import UsageError
from sdflow.machine import packages
from sdflow.manifest.provenance import PROVENANCE_FILE
from sdflow.passes.registry import catalog
from sdflow.run.options import RunOptions
from sdflow.run.run import run_workflow
from sdflow.run.structures import Exported, export_structures, import_structures
from sdflow.sources import Checkpoint
from sdflow.sources.architectures import architecture_config
from sdflow.store import Cache
from sdflow.store.records import dump
from sdflow.store.remote.entry import LIST, action_path, object_path
from sdflow.store.remote.share import FOLDER
from sdflow.store.signing import Signer, make_key

SUBMODELS = {
    "text_encoder": {
        "passes": [
            {"pass": "OnnxConversion"},
            {"pass": "LoraMerge"},
            {"pass": "OrtTransformersOptimization", "model_type": "clip"},
            {"pass": "OnnxFloatToFloat16"},
        ]
    },
    "vae_decoder": {"passes": [{"pass": "OnnxConversion"}]},
}


@dataclass
class Machines:
    """A machine that has everything, and one that has not; the archive that goes from one to the other."""

    folder: Path
    light: LightInstall
    archive: Path
    exported: Exported

    @property
    def full(self) -> Cache:
        return Cache(self.folder / "full")

    def workflow(self, name: str, **more: Any) -> Path:
        content = {
            "model": "synthetic:sd15-tiny",
            "target": "cpu",
            "submodels": SUBMODELS,
            "evaluate": {"image": None, "latency": None},
            **more,
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content))
        return path


@pytest.fixture(scope="module")
def machines(started_python: StartedPython | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """The structures of a text encoder, optimized and in float16, and of a VAE's decoder, built and exported."""
    folder = tmp_path_factory.mktemp("machines")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("PYTHONPATH", str(TESTS.parent))
        machines = Machines(folder, light_install(folder, "bind"), folder / "structures.sdflow", None)  # type: ignore[arg-type]
        with forking(started_python):
            names = [str(machines.workflow("structures"))]
            machines.exported = export_structures(names, (), machines.archive, machines.full, Events(), verify=False)
            yield machines


@pytest.fixture(scope="module")
def single_file(machines: Machines, tiny_checkpoint: Checkpoint) -> Path:
    """A checkpoint in one file, in the original names; its weights are those of `synthetic:sd15-tiny`."""
    path = machines.folder / "model.safetensors"
    save_file(original_layout(tiny_checkpoint), path)
    return path


@pytest.fixture(scope="module")
def imported_there(machines: Machines) -> LightInstall:
    done = machines.light.run("cache", "import", str(machines.archive))
    assert done.returncode == 0, done.stderr
    assert "4 of 4 results were new" in done.stdout
    return machines.light


@pytest.fixture(scope="module")
def base_there(machines: Machines, imported_there: LightInstall) -> Path:
    """A pipeline that was built there, of random weights."""
    done = imported_there.run("run", str(machines.workflow("base")))
    assert done.returncode == 0, done.stderr
    return imported_there.folder / "pipelines" / "base"


def test_the_light_installation_has_none_of_the_large_packages(machines: Machines) -> None:
    script = "import importlib.util, sys; print([name for name in sys.argv[1:] if importlib.util.find_spec(name)])"
    done = machines.light.start("-c", script, *HEAVY, "onnx", "onnxruntime")
    assert done.stdout.strip() == "['onnx', 'onnxruntime']", done.stderr


def test_a_light_machine_binds_what_the_full_one_binds_byte_for_byte(
    machines: Machines, imported_there: LightInstall, single_file: Path
) -> None:
    lora = write_lora(machines.folder / "lora.safetensors", ["text_encoder"])
    path = machines.workflow("bound", model=str(single_file), loras=[{"file": str(lora), "scale": 0.5}])
    done = imported_there.run("run", str(path), "--copy")
    assert done.returncode == 0, done.stderr
    assert "2 of 6 steps ran" in done.stderr
    assert "bound: not verified against PyTorch: torch, " in done.stderr
    loaded = load_workflow(path, catalog=catalog())
    options = RunOptions(
        out=machines.folder / "pipelines", results=machines.folder / "results", copy=True, verify=False
    )
    run_workflow(loaded, machines.full, options, Events())
    here, there = (
        content(machines.folder / "pipelines" / "bound"),
        content(imported_there.folder / "pipelines" / "bound"),
    )
    assert here.keys() == there.keys() and "text_encoder/model.onnx.data" in here
    differing = [name for name in here if here[name] != there[name]]
    assert set(differing) <= {PROVENANCE_FILE}, "which names the packages that are installed on the machine"


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_a_folder_whose_configs_were_written_by_another_release_takes_the_same_structures(
    machines: Machines, imported_there: LightInstall, base_there: Path, tiny_torch: Any
) -> None:
    """diffusers and transformers write all the entries that have their default values, and those who publish do not."""
    folder = machines.folder / "saved"
    tiny_torch.save_pretrained(folder)
    config = folder / "text_encoder" / "config.json"
    entries = json.loads(config.read_text())
    assert len(entries) > len(architecture_config("sd15-tiny", "text_encoder"))
    done = imported_there.run("run", str(machines.workflow("saved", model=str(folder))))
    assert done.returncode == 0, done.stderr
    there = imported_there.folder / "pipelines" / "saved"
    for name in ("text_encoder/model.onnx", "text_encoder/model.onnx.data", "vae_decoder/model.onnx.data"):
        assert (there / name).read_bytes() == (base_there / name).read_bytes(), "the same weights"
    config.write_text(json.dumps({**entries, "hidden_act": "gelu"}))
    done = imported_there.run("run", str(machines.workflow("other", model=str(folder))))
    assert done.returncode == 2 and "text_encoder of this architecture for cpu" in done.stderr


def test_the_plan_there_has_the_keys_of_the_structures_and_says_with_what_they_were_made(
    machines: Machines, imported_there: LightInstall
) -> None:
    path = machines.workflow("planned", model="synthetic:sd15-tiny?seed=7")
    done = imported_there.run("plan", str(path), "--json")
    told = json.loads(done.stdout)
    (plan,) = make_plan(load_workflow(path, catalog=catalog()), machines.full).pipelines
    keys = {each.step.id: each.action.digest for each in plan.steps(machines.full) if each.action}
    assert {each["step"]: each["action"] for each in told["steps"]} == keys
    states = {each["step"]: each["state"] for each in told["steps"]}
    binds = {"planned/text_encoder/3", "planned/vae_decoder/1"}
    assert states == {each: "to run" if each in binds else "cached" for each in keys}
    (note,) = told["notes"]
    assert note.startswith("text_encoder, vae_decoder: the structures were imported, made with diffusers ")
    assert f"torch {packages.distribution_version('torch')}" in note and "not installed here: " in note


def test_a_pipeline_that_was_built_there_is_baked_there(
    machines: Machines, imported_there: LightInstall, base_there: Path
) -> None:
    lora = write_lora(machines.folder / "other.safetensors", ["text_encoder"], seed=4)
    done = imported_there.run("bake", "--base", str(base_there), "--lora", f"{lora}:0.7", "--out", "pipelines/baked")
    assert done.returncode == 0, done.stderr
    assert (imported_there.folder / "pipelines/baked/text_encoder/model.onnx.data").is_file()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"submodels": {"unet": {"passes": [{"pass": "OnnxConversion"}]}}}, "unet of sd15-tiny for cpu"),
        ({"carry_weights": True}, "text_encoder/0 OnnxConversion is not cached. It reads the weights themselves"),
    ],
)
def test_what_is_missing_there_is_said_and_nothing_runs(
    machines: Machines, imported_there: LightInstall, more: dict[str, Any], told: str
) -> None:
    done = imported_there.run("run", str(machines.workflow("missing", **more)))
    assert done.returncode == 2, done.stdout
    assert told in done.stderr and "pip install 'sdflow[build]'" in done.stderr
    assert "which are not installed" in done.stderr and "Traceback" not in done.stderr
    if "carry_weights" not in more:
        assert "sdflow cache export --structures sd15-tiny --target cpu FILE" in done.stderr


@pytest.mark.parametrize(
    "words", ["generate . --prompt cat", "selftest", "bake --base . --lora lora.safetensors --out out --verify"]
)
def test_commands_that_need_more_say_so_there(machines: Machines, words: str) -> None:
    done = machines.light.run(*words.split())
    assert done.returncode == 2, done.stderr
    assert "not installed\n  pip install 'sdflow[build]'" in done.stderr and "Traceback" not in done.stderr


def test_export_says_what_it_wrote(machines: Machines) -> None:
    (structure,) = machines.exported.structures
    assert structure["submodels"] == ["text_encoder", "vae_decoder"] and structure["verified"] is None
    assert machines.exported.bytes == machines.archive.stat().st_size
    assert machines.exported.bytes < machines.exported.unpacked
    again = machines.folder / "again.sdflow"
    with pytest.raises(UsageError, match="no architecture is called 'sd16'"):
        export_structures(["sd16"], ["cpu"], again, machines.full, Events())
    carried = str(machines.workflow("carried", carry_weights=True, submodels={"vae_decoder": SUBMODELS["vae_decoder"]}))
    with pytest.raises(UsageError, match="the graphs of vae_decoder contain their weights"):
        export_structures([carried], (), again, machines.full, Events(), verify=False)
    assert not again.exists()


Members = dict[str, bytes]


def unpacked(path: Path) -> Members:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(members: Members, compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def with_pieces(members: Members, change: Callable[[bytes], bytes | None]) -> bytes:
    """The archive with other content in the place of a piece, or without it."""
    name = next(name for name in members if "/pieces/" in name)
    changed = change(members.pop(name))
    return packed(members if changed is None else {**members, name: changed})


def relisted(members: Members, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The archive with other actions, whose digests and list are right."""
    listed, digests = json.loads(members[LISTED])["record"], []
    for digest in listed["actions"]:
        body = json.loads(members.pop(f"{FOLDER}/{action_path(digest)}"))["record"]
        change(body)
        digests.append(Action(body["action"]).digest)
        members[f"{FOLDER}/{action_path(digests[-1])}"] = dump(body)
    return packed({**members, LISTED: dump({**listed, "actions": digests})})


def _escaping(members: Members) -> bytes:
    """A manifest that leads outside, and whose digests all hold: whoever made it wanted it so."""
    old = next(name for name in members if "/objects/" in name)
    body = json.loads(members.pop(old))["record"]
    body["files"][0][0] = "../../../outside"
    tree = digest_tree(FileEntry(*each[:3]) for each in body["files"])
    members[f"{FOLDER}/{object_path(tree)}"] = dump({**body, "object": tree})

    def change(record: dict[str, Any]) -> None:
        record["object"] = tree if record["object"] == body["object"] else record["object"]

    return relisted(members, change)


def _of_pass(version: int, body: dict[str, Any]) -> None:
    body["action"]["pass"]["version"] = version


def _bound(body: dict[str, Any]) -> None:
    del body["action"]["weights"]


def _of_another_form(body: dict[str, Any]) -> None:
    _of_pass(99, body)
    _bound(body)


LISTED = f"{FOLDER}/{LIST}"
DAMAGES: dict[str, tuple[Callable[[bytes, Members], bytes], str]] = {
    "truncated": (lambda data, members: data[: len(data) // 2], "damaged"),
    "without its last bytes": (lambda data, members: data[:-20], "damaged"),
    "flipped": (lambda data, members: data[:2000] + bytes([data[2000] ^ 1]) + data[2001:], "damaged"),
    "empty": (lambda data, members: b"", "damaged"),
    "no archive": (lambda data, members: b"PK\x03\x04 something else" * 50, "not an archive of structures"),
    "another archive": (lambda data, members: packed({"readme": b"{}"}), "contains no exported structures"),
    "another list": (lambda data, members: packed({**members, LISTED: b"{}"}), "not an archive of structures"),
    "a file changed": (lambda data, members: with_pieces(members, lambda piece: b"x" + piece[1:]), "another digest"),
    "a file missing": (lambda data, members: with_pieces(members, lambda piece: None), "has lost parts"),
    "a bomb": (lambda data, members: with_pieces(members, lambda piece: bytes(200 << 20)), "it is longer than"),
    "compressed otherwise": (lambda data, members: packed(members, zipfile.ZIP_LZMA), "other than deflate"),
    "a list that leads outside": (lambda data, members: _escaping(members), "outside the object"),
    "what is no structure": (lambda data, members: relisted(members, _bound), "something other than structures"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_archive_that_is_not_whole_is_refused_and_nothing_is_imported(
    machines: Machines, tmp_path: Path, damage: str
) -> None:
    change, told = DAMAGES[damage]
    path = tmp_path / "damaged.sdflow"
    path.write_bytes(change(machines.archive.read_bytes(), unpacked(machines.archive)))
    cache = Cache(tmp_path / "cache")
    with pytest.raises(UsageError, match=told) as refused:
        import_structures(path, cache)
    assert refused.value.remedy and "Nothing was imported" in refused.value.remedy
    assert not cache.entries() and not cache.notes.imported_architectures() and not (tmp_path / "outside").exists()


VERSIONS: dict[str, tuple[Callable[[bytes, Members], bytes], str, str]] = {
    "a newer format": (
        lambda data, members: packed({**members, LISTED: dump({"format": 3})}),
        "a newer version of sdflow wrote it: its list has format 3, and this sdflow reads format 2", "Update sdflow, or export"
    ),
    "newer passes": (
        lambda data, members: relisted(members, partial(_of_pass, 99)),
        f"a newer version of sdflow wrote it: sdflow {__version__} has version 99 of OnnxConversion", "Update sdflow, or export"
    ),
    "newer passes of another form": (
        lambda data, members: relisted(members, _of_another_form),
        "a newer version of sdflow wrote it", "Update sdflow, or export"
    ),
    "older passes": (
        lambda data, members: relisted(members, partial(_of_pass, 0)), "another version of sdflow wrote it", ". Export"
    ),
}  # fmt: skip


@pytest.mark.parametrize("written", VERSIONS)
def test_an_archive_of_another_version_is_not_called_damaged(machines: Machines, tmp_path: Path, written: str) -> None:
    change, told, remedy = VERSIONS[written]
    path = tmp_path / "other.sdflow"
    path.write_bytes(change(machines.archive.read_bytes(), unpacked(machines.archive)))
    cache = Cache(tmp_path / "cache")
    with pytest.raises(UsageError) as refused:
        import_structures(path, cache)
    assert refused.value.what.startswith(told) and "damaged" not in str(refused.value)
    assert f"{remedy} the structures again with sdflow {__version__}." in str(refused.value.remedy)
    assert not cache.entries()


def test_no_name_in_an_archive_is_taken_for_a_path(machines: Machines, tmp_path: Path) -> None:
    path = tmp_path / "more.zip"
    members = {**unpacked(machines.archive), "../../outside": b"x", f"{FOLDER}/actions/../../../outside": b"x"}
    path.write_bytes(packed(members))
    assert len(import_structures(path, Cache(tmp_path / "cache")).new) == 4
    assert not list(tmp_path.rglob("outside"))


@pytest.mark.parametrize("kind", ["folder", "archive", "url"])
def test_structures_are_exported_to_any_place_and_imported_from_there(
    machines: Machines, tmp_path: Path, kind: str
) -> None:
    where = {"folder": f"{tmp_path}/there", "archive": f"{tmp_path}/x.zip", "url": "memory://structures"}[kind]
    key, names = make_key(tmp_path / "key.pem"), [str(machines.workflow("structures"))]
    exported = export_structures(
        names, (), where, machines.full, Events(), verify=False, signer=Signer(tmp_path / "key.pem")
    )
    assert (exported.bytes is None) is (kind != "archive")
    with pytest.raises(UsageError, match="no signature from anyone you trust"):
        import_structures(where, Cache(tmp_path / "strict"), [make_key(tmp_path / "another.pem")])
    with pytest.raises(UsageError, match="no signature from anyone you trust"):
        import_structures(machines.archive, Cache(tmp_path / "strict"), [key])
    assert not Cache(tmp_path / "strict").entries()
    cache = Cache(tmp_path / "cache")
    assert len(import_structures(where, cache, [key]).new) == 4
    assert {entry.object for entry in cache.entries()} <= {entry.object for entry in machines.full.entries()}


def test_an_archive_is_the_same_bytes_whenever_it_is_packed(machines: Machines) -> None:
    with zipfile.ZipFile(machines.archive) as archive:
        assert {member.date_time for member in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert archive.namelist() == sorted(archive.namelist())


def test_of_several_imported_structures_the_one_most_like_this_machine_is_taken(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path / "cache")
    import_structures(machines.archive, cache)
    (plan,) = make_plan(load_workflow(machines.workflow("several"), catalog=catalog()), cache).pipelines
    first = plan.chains[0].steps[0]
    (own,) = cache.notes.imported(first.action(None, cache.salt))
    older = Action({**own.content, "uses": {**own.content["uses"], "onnx": "1.0"}})
    with cache.staging(older) as staging:
        (staging.files / "model.onnx").write_bytes(b"older")
        staging.publish({}, {})
    cache.notes.note_imported([older])
    assert cache.notes.imported(first.action(None, cache.salt)) == [own, older]
    absent = {"torch", "diffusers", "transformers", "olive-ai"}
    found = packages.found_version
    monkeypatch.setattr("sdflow.build.chain.missing", lambda *names: tuple(each for each in names if each in absent))
    monkeypatch.setattr("sdflow.build.chain.found_version", lambda name: None if name in absent else found(name))
    (light,) = make_plan(load_workflow(machines.workflow("several"), catalog=catalog()), cache).pipelines
    step = light.chains[0].steps[0]
    assert step.lacks and step.uses == own.content["uses"], (
        "the last that was imported has another onnx than this machine"
    )
    cache.forget(own)
    assert imported.as_imported([step], cache)[0].uses == older.content["uses"], "of what is still here"


@pytest.mark.slow
def test_a_whole_pipeline_in_an_environment_that_pip_made(
    tmp_path: Path, tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip makes the light installation, of at most 250 MB; a verified export of all submodels is imported there."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    place = tmp_path / "environment"
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    constraints = ["-c", str(ROOT / "constraints.txt")]
    subprocess.run([python, "-m", "pip", "install", "-q", *constraints, f"{ROOT}[bind]"], check=True, cwd=tmp_path)
    (packages,) = place.glob("lib/python*/site-packages")
    ours = [path for path in packages.iterdir() if not path.name.startswith(("pip", "setuptools", "pkg_resources"))]
    size = sum(file.stat().st_size for path in ours for file in [path, *path.rglob("*")] if file.is_file())
    assert size < 250e6
    light = LightInstall(python, tmp_path / "work")
    light.folder.mkdir()
    archive, full = tmp_path / "tiny.sdflow", Cache(tmp_path / "full")
    exported = export_structures(["sd15-tiny"], ["cpu", "directml"], archive, full, Events())
    assert [each["verified"]["level"] for each in exported.structures] == ["quick", "quick"]
    assert light.run("cache", "import", str(archive)).returncode == 0
    file = tmp_path / "model.safetensors"
    save_file(original_layout(tiny_checkpoint), file)
    lora = write_lora(tmp_path / "lora.safetensors")
    workflow = tmp_path / "tiny.yaml"
    content_of = {
        "extends": "base/tiny.yaml",
        "model": str(file),
        "target": ["cpu", "directml"],
        "loras": [{"file": str(lora), "scale": 0.5}],
    }
    workflow.write_text(yaml.safe_dump(content_of))
    done = light.run("run", str(workflow), "--copy")
    assert done.returncode == 0, done.stderr
    options = RunOptions(out=tmp_path / "pipelines", results=tmp_path, copy=True, verify=False, evaluate=False)
    run_workflow(load_workflow(workflow, catalog=catalog()), full, options, Events())
    there, here = content(light.folder / "pipelines"), content(tmp_path / "pipelines")
    assert here.keys() == there.keys() and "tiny-directml/unet/model.onnx.data" in here
    differing = [name for name in here if here[name] != there[name]]
    assert set(differing) <= {PROVENANCE_FILE}, "which names the packages that are installed on the machine"
