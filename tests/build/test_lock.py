"""A lock: what is locked is accepted, anything else is refused by name, whichever part of it differs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from small_lora import write_lora
from small_workflows import SMALL_PASSES, Bench

from sdflow.build.lock import locked_plan, write_lock
from sdflow.build.lock_content import Lock, LockedChain, LockedInput, LockedPipeline, differences
from sdflow.config import load_workflow
from sdflow.config.workflow import Workflow
from sdflow.errors import UsageError
from sdflow.passes import registry

DIGESTS = st.text("0123456789abcdef", min_size=64, max_size=64)
COMMITS = st.text("0123456789abcdef", min_size=40, max_size=40)
NAMES = st.text("abcdefghij./-_", min_size=1, max_size=12)
REFERENCES = st.builds("hf:{}/{}".format, st.sampled_from("abc"), st.sampled_from(["x", "y@main", "z@v2"])) | NAMES
LOCKS = st.builds(
    Lock,
    inputs=st.dictionaries(
        REFERENCES,
        st.builds(LockedInput, commit=st.none() | COMMITS, files=st.dictionaries(NAMES, DIGESTS, max_size=2)),
        min_size=1,
        max_size=3,
    ),
    scripts=st.dictionaries(NAMES, DIGESTS, max_size=2),
    packages=st.dictionaries(NAMES, NAMES, min_size=1, max_size=2),
    pipelines=st.dictionaries(
        NAMES,
        st.builds(
            LockedPipeline,
            target=NAMES,
            model=REFERENCES,
            loras=st.lists(st.builds("{} {}".format, REFERENCES, st.sampled_from(["1", "0.5"])), max_size=2),
            lora_files=st.lists(DIGESTS, max_size=2),
            submodels=st.dictionaries(
                NAMES,
                st.builds(
                    LockedChain,
                    checkpoint=DIGESTS,
                    steps=st.lists(st.builds("{} 1 {}".format, NAMES, DIGESTS), min_size=1, max_size=2),
                ),
                min_size=1,
                max_size=2,
            ),
        ),
        min_size=1,
        max_size=2,
    ),
)


@settings(max_examples=40)
@given(LOCKS)
def test_a_lock_is_read_as_it_was_written_and_differs_from_itself_in_nothing(lock: Lock) -> None:
    written = json.dumps(lock.model_dump(exclude_none=True))
    jsonschema.validate(json.loads(written), Lock.model_json_schema())
    assert Lock.model_validate(json.loads(written)) == lock
    assert list(differences(lock, lock)) == []
    pinned = lock.at_commits()
    assert list(differences(pinned, pinned.at_commits())) == [], "a reference at its commit stays what it is"


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            yield from leaves(each, (*path, key))
    elif path != ("format_version",):
        yield path


def changed(value: Any, path: tuple[Any, ...]) -> Any:
    """The same with another value of the same form there."""
    copied = json.loads(json.dumps(value))
    inner = copied
    for key in path[:-1]:
        inner = inner[key]
    old = inner[path[-1]]
    inner[path[-1]] = old[:-1] + ("0" if old[-1] != "0" else "1")
    return copied


@settings(max_examples=40)
@given(LOCKS, st.data())
def test_whatever_differs_is_told(lock: Lock, data: st.DataObject) -> None:
    content = lock.model_dump(exclude_none=True)
    path = data.draw(st.sampled_from(list(leaves(content))))
    other = Lock.model_validate(changed(content, path))
    assert list(differences(other, lock)), path
    assert list(differences(lock, other)), path


@settings(max_examples=40)
@given(LOCKS, st.data())
def test_what_is_not_in_the_lock_is_told_by_name(lock: Lock, data: st.DataObject) -> None:
    content = lock.model_dump(exclude_none=True)
    kind = data.draw(st.sampled_from([key for key in ("inputs", "scripts", "packages", "pipelines") if content[key]]))
    name = data.draw(st.sampled_from(sorted(content[kind])))
    del content[kind][name]
    less = Lock.model_validate(content)
    assert any(name in each and "not in the lock" in each for each in differences(lock, less))
    assert list(differences(less, lock)) == [], "what is locked and not asked for is no difference"


@pytest.fixture
def locked(bench: Bench) -> Iterator[Callable[..., Workflow]]:
    """Loads a workflow with a LoRA of its own whose UNet is made by a script, locked once."""
    write_lora(bench.folder / "ink.safetensors", seed=1)
    script = bench.folder / "own.py"
    script.write_text(SMALL_PASSES.read_text())
    chain = [{"pass": "own.py:Convert", "text": "a"}, {"pass": "own.py:Append", "text": "b"}]
    content = {
        "extends": "base/tiny.yaml",
        "target": ["cpu", "cuda"],
        "loras": [{"file": "ink.safetensors", "scale": 0.5}],
        "submodels": {"vae_decoder": {"passes": chain}},
    }
    path = bench.folder / "w.yaml"
    path.write_text(yaml.safe_dump(content))

    def load(*overrides: str, targets: tuple[str, ...] = ()) -> Workflow:
        return load_workflow(path, catalog=registry.catalog(), overrides=overrides, targets=targets)

    write_lock(load(), bench.cache)
    yield load


def refusal(bench: Bench, workflow: Workflow) -> str:
    with pytest.raises(UsageError) as raised:
        locked_plan(workflow, bench.cache)
    assert "w.yaml.lock" in str(raised.value) and "sdflow lock" in str(raised.value)
    return str(raised.value)


def test_a_workflow_is_held_to_its_lock(bench: Bench, locked: Callable[..., Workflow], tmp_path: Path) -> None:
    lock = json.loads((bench.folder / "w.yaml.lock").read_text())
    assert str(tmp_path) not in json.dumps(lock), "the lock can be committed"
    assert {"ink.safetensors", "synthetic:sd15-tiny"} == set(lock["inputs"])
    assert set(lock["scripts"]) == {"own.py"}
    plan = locked_plan(locked(), bench.cache)
    assert [each.pipeline.target for each in plan.pipelines] == ["cpu", "cuda"]

    assert "options that differ from the lock" in refusal(bench, locked("vae_decoder.passes.1.text=c"))
    assert "synthetic:sd15-tiny?seed=1 is not in the lock" in refusal(bench, locked("model=synthetic:sd15-tiny?seed=1"))
    assert "is not in the lock" in refusal(bench, locked(targets=("directml",)))
    assert "ink.safetensors 0.7, but locked as ink.safetensors 0.5" in refusal(bench, locked("loras.0.scale=0.7"))

    script = bench.folder / "own.py"
    script.write_text(script.read_text() + "# a word\n")
    assert "script own.py is" in refusal(bench, locked())
    write_lock(locked(), bench.cache)
    write_lora(bench.folder / "ink.safetensors", seed=2)
    assert "ink.safetensors has changed: SHA-256" in refusal(bench, locked())
    write_lock(locked(), bench.cache)
    locked_plan(locked(), bench.cache)


def test_a_lock_says_which_file_of_a_repository_is_at_which_scale(
    bench: Bench, locked: Callable[..., Workflow]
) -> None:
    """Two LoRAs of one folder have one reference: only their files tell them apart."""
    (bench.folder / "pair").mkdir()
    for name, seed in (("a", 1), ("b", 2)):
        write_lora(bench.folder / "pair" / f"{name}.safetensors", seed=seed)

    def load(*names: str) -> Workflow:
        loras = [
            {"file": "pair", "weight_name": f"{name}.safetensors", "scale": scale}
            for name, scale in zip(names, (1, 0.5), strict=True)
        ]
        path = bench.folder / "w.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "loras": loras}))
        return locked()

    write_lock(load("a", "b"), bench.cache)
    locked_plan(locked(), bench.cache)
    assert "lora_files" in refusal(bench, load("b", "a"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no lock"),
        ("{", "is no lock"),
        ("[]", "is no lock"),
        ('{"format_version": 2, "inputs": {}, "packages": {}, "pipelines": {}}', "format_version"),
        ('{"format_version": 1, "inputs": {"x": {"commit": "main"}}, "packages": {}, "pipelines": {}}', "commit"),
    ],
)
def test_a_missing_or_damaged_lock_is_told(
    bench: Bench, locked: Callable[..., Workflow], content: str | None, says: str
) -> None:
    lock = bench.folder / "w.yaml.lock"
    lock.unlink() if content is None else lock.write_text(content)
    assert says in refusal(bench, locked())
