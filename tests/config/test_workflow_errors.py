"""Each kind of mistake in a workflow is reported once, at the line and column where it is written, with a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdflow.config import load_workflow
from sdflow.errors import Problem, WorkflowError

from .workflow_catalog import SmallCatalog

# The first line of every workflow here is its own; this follows, so that only what a test writes is wrong.
CHAINS = """
submodels:
  text_encoder: {passes: [{pass: OnnxConversion}, {pass: LoraMerge}]}
  unet: {passes: [{pass: OnnxConversion}, {pass: LoraMerge}, {pass: OnnxFloatToFloat16}]}
  vae_decoder: {passes: [{pass: OnnxConversion}, {pass: OrtTransformersOptimization, model_type: vae}]}
"""
HEAD = "{model: synthetic:sd15, target: cpu, evaluate: null, submodels: {unet: {passes: "


def problems_of(path: Path, **given: list[str]) -> list[Problem]:
    with pytest.raises(WorkflowError) as caught:
        load_workflow(path, catalog=SmallCatalog(), **given)
    return list(caught.value.problems)


def only_problem(folder: Path, text: str, **given: list[str]) -> Problem:
    path = folder / "w.yaml"
    path.write_text(text, encoding="utf-8")
    found = problems_of(path, **given)
    assert len(found) == 1, "\n".join(map(str, found))
    assert found[0].file == str(path)
    return found[0]


TOP = {
    "unknown key": ("modle: x\nmodel: sample:shapes\ntarget: cpu", 1, 1, "unknown key 'modle'", "'model'"),
    "missing model": ("target: cpu", 1, 1, "no `model`", "hf:owner/name"),
    "missing target": ("model: synthetic:sd15", 1, 1, "no `target`", "cuda"),
    "unknown target": ("model: synthetic:sd15\ntarget: cudda", 2, 9, "unknown target 'cudda'", "'cuda'"),
    "target twice": ("model: synthetic:sd15\ntarget: [cpu, cpu]", 2, 15, "listed twice", None),
    "no target in the list": ("model: synthetic:sd15\ntarget: []", 2, 9, "`target` is empty", "cuda"),
    "target of another type": ("model: synthetic:sd15\ntarget: {cpu: 1}", 2, 9, "found a map", None),
    "key twice": ("model: synthetic:sd15\ntarget: cpu\ntarget: cuda", 3, 1, "'target' is written twice", "w.yaml:2:1"),
    "name with a slash": ("model: synthetic:sd15\ntarget: cpu\nname: a/b", 3, 7, "`name` must be", None),
    "name of another type": ("model: synthetic:sd15\ntarget: cpu\nname: 12", 3, 7, "found the number 12", None),
    "allow_pickle as text": ("model: synthetic:sd15\ntarget: cpu\nallow_pickle: yes", 3, 15, "true or false", None),
    "model of another type": ("model: [a]\ntarget: cpu", 1, 8, "must be a reference to a checkpoint", None),
    "unknown scheme": ("model: hff:a/b\ntarget: cpu", 1, 8, "'hff:'", "'hf'"),
    "a web address": ("model: https://a/b\ntarget: cpu", 1, 8, "'https:'", "hf:owner/name"),
    "hub without owner": ("model: hf:name\ntarget: cpu", 1, 8, "not of the form hf:owner/name", None),
    "unknown synthetic": ("model: synthetic:sd155\ntarget: cpu", 1, 8, "unknown synthetic model 'sd155'", "'sd15'"),
    "bad seed": ("model: synthetic:sd15?seed=x\ntarget: cpu", 1, 8, "synthetic:sd15?seed=0", None),
    "seed of a sample": ("model: sample:shapes?seed=1\ntarget: cpu", 1, 8, "sample:shapes", None),
    "missing file": ("model: modells\ntarget: cpu", 1, 8, "no file or folder 'modells'", "'models'"),
    "missing folder": ("model: nowhere/a.safetensors\ntarget: cpu", 1, 8, "no file or folder", "no folder"),
    "pickled weights": ("model: models/old.ckpt\ntarget: cpu", 1, 8, "pickled", "allow_pickle: true"),
    "no checkpoint": ("model: models/notes.txt\ntarget: cpu", 1, 8, "is not a checkpoint", ".safetensors"),
    "components of another type": (
        "model: synthetic:sd15\ntarget: cpu\ncomponents: a",
        3,
        13,
        "must be a map like",
        None,
    ),
    "unknown component": (
        "model: synthetic:sd15\ntarget: cpu\ncomponents: {vea: synthetic:sd15}",
        3,
        14,
        "unknown component 'vea'",
        "'vae'",
    ),
    "a component that cannot be exchanged": (
        "model: synthetic:sd15\ntarget: cpu\ncomponents: {tokenizer: synthetic:sd15}",
        3,
        14,
        "unknown component 'tokenizer'",
        "known: vae, unet",
    ),
    "component of another type": (
        "model: synthetic:sd15\ntarget: cpu\ncomponents: {vae: [a]}",
        3,
        19,
        "`components.vae` must be a reference",
        None,
    ),
    "component, missing file": (
        "model: synthetic:sd15\ntarget: cpu\ncomponents: {vae: modells}",
        3,
        19,
        "no file or folder 'modells'",
        "'models'",
    ),
    "component, unknown scheme": (
        "model: synthetic:sd15\ntarget: cpu\ncomponents: {vae: hff:a/b}",
        3,
        19,
        "'hff:'",
        "'hf'",
    ),
    "component, pickled": (
        "model: synthetic:sd15\ntarget: cpu\ncomponents: {vae: models/old.ckpt}",
        3,
        19,
        "pickled",
        "allow_pickle: true",
    ),
    "unknown architecture": (
        "model: models/lora1.safetensors#sd21-bsae\ntarget: cpu",
        1,
        8,
        "unknown architecture 'sd21-bsae'",
        "'sd21-base'",
    ),
    "missing file of an architecture": (
        "model: models/lora3.safetensors#sd21-base\ntarget: cpu",
        1,
        8,
        "no file or folder 'models/lora3.safetensors'",
        "'lora",
    ),
    "loras of another type": ("model: synthetic:sd15\ntarget: cpu\nloras: a", 3, 8, "must be a list of LoRAs", None),
    "LoRA as text": ("model: synthetic:sd15\ntarget: cpu\nloras: [a]", 3, 9, "must be a map like {file:", None),
    "LoRA without file": ("model: synthetic:sd15\ntarget: cpu\nloras: [{scale: 1}]", 3, 9, "'file' is required", None),
    "LoRA, unknown key": (
        "model: synthetic:sd15\ntarget: cpu\nloras: [{file: hf:a/b, scael: 1}]",
        3,
        24,
        "unknown option 'scael'",
        "'scale'",
    ),
    "LoRA, scale as text": (
        "model: synthetic:sd15\ntarget: cpu\nloras: [{file: hf:a/b, scale: much}]",
        3,
        31,
        "valid number",
        None,
    ),
    "LoRA, no finite scale": (
        "model: synthetic:sd15\ntarget: cpu\nloras: [{file: hf:a/b, scale: .inf}]",
        3,
        31,
        "finite",
        None,
    ),
    "LoRA, missing file": (
        "model: synthetic:sd15\ntarget: cpu\nloras: [{file: models/lora.safetensors}]",
        3,
        16,
        "no file",
        "did you mean 'lora",
    ),
    "LoRA, pickled": (
        "model: synthetic:sd15\ntarget: cpu\nloras: [{file: models/old.ckpt}]",
        3,
        16,
        "not a LoRA",
        ".safetensors",
    ),
    "LoRA, folder of several": (
        "model: synthetic:sd15\ntarget: cpu\nloras: [{file: models}]",
        3,
        16,
        "holds several",
        "lora1.safetensors",
    ),
    "LoRA, file and name within": (
        "model: synthetic:sd15\ntarget: cpu\nloras: [{file: models/lora1.safetensors, weight_name: a}]",
        3,
        16,
        "`weight_name`",
        "leave it out",
    ),
    "LoRA, synthetic": (
        "model: synthetic:sd15\ntarget: cpu\nloras: [{file: synthetic:x}]",
        3,
        16,
        "'synthetic:'",
        "hf",
    ),
    "matrix of another type": ("model: synthetic:sd15\ntarget: cpu\nmatrix: 3", 3, 9, "`matrix` must be a map", None),
    "matrix, unknown axis": (
        "model: synthetic:sd15\ntarget: cpu\nmatrix: {models: [a]}",
        3,
        10,
        "unknown axis 'models'",
        "'model'",
    ),
    "matrix, empty axis": ("target: cpu\nmatrix: {model: []}", 2, 17, "there is no pipeline", "leave the axis out"),
    "matrix, axis as text": ("target: cpu\nmatrix: {model: a}", 2, 17, "a list, or a map", None),
    "matrix, value twice": (
        "target: cpu\nmatrix: {model: [synthetic:sd15, synthetic:sd15]}",
        2,
        34,
        "this value twice",
        "w.yaml:2:18",
    ),
    "matrix too large": (
        "model: synthetic:sd15\nmatrix: {target: [cpu, cuda], loras: ["
        + ", ".join(f"[{{file: hf:a/b{n}}}]" for n in range(200))
        + "]}",
        2,
        9,
        "400 cells",
        "256",
    ),
    "evaluate of another type": ("model: synthetic:sd15\ntarget: cpu\nevaluate: 3", 3, 11, "`evaluate` must be", None),
    "evaluate, unknown key": (
        "model: synthetic:sd15\ntarget: cpu\nevaluate: {latencies: {}}",
        3,
        12,
        "unknown option 'latencies'",
        "'latency'",
    ),
    "evaluate, unknown key within": (
        "model: synthetic:sd15\ntarget: cpu\nevaluate:\n  latency: {run: 3}",
        4,
        13,
        "unknown option 'run'",
        "'runs'",
    ),
    "evaluate, no positive count": (
        "model: synthetic:sd15\ntarget: cpu\nevaluate: {latency: {runs: 0}}",
        3,
        28,
        "'latency.runs'",
        None,
    ),
    "evaluate, no image size": (
        "model: synthetic:sd15\ntarget: cpu\nevaluate: {image: {width: 513}}",
        3,
        27,
        "multiple of 8",
        None,
    ),
    "evaluate, number as text": (
        "model: synthetic:sd15\ntarget: cpu\nevaluate: {image: {prompt: 12}}",
        3,
        28,
        "must be text",
        "quotes",
    ),
    "evaluate, yes": (
        "model: synthetic:sd15\ntarget: cpu\nevaluate: {allow_fallback: yes}",
        3,
        28,
        "boolean",
        "true or false",
    ),
    "targets of another type": ("model: synthetic:sd15\ntarget: cpu\ntargets: 1", 3, 10, "`targets` must be", None),
    "targets, unknown target": (
        "model: synthetic:sd15\ntarget: cpu\ntargets: {direct_ml: {}}",
        3,
        11,
        "unknown target",
        "'directml'",
    ),
    "targets, null": ("model: synthetic:sd15\ntarget: cpu\ntargets: {cuda: 3}", 3, 17, "a target's changes", None),
    "targets, unknown key": (
        "model: synthetic:sd15\ntarget: cpu\ntargets: {cuda: {submodel: {}}}",
        3,
        18,
        "unknown key",
        "'submodels'",
    ),
    "targets, unknown submodel": (
        "model: synthetic:sd15\ntarget: cpu\ntargets: {cuda: {submodels: {vae: {}}}}",
        3,
        30,
        "unknown submodel",
        None,
    ),
    "targets, unknown pass": (
        "model: synthetic:sd15\ntarget: cpu\ntargets: {cuda: {passes: {OnnxFloatToFloat61: null}}}",
        3,
        27,
        "unknown pass",
        "'OnnxFloatToFloat16'",
    ),
    "targets, unknown option": (
        "model: synthetic:sd15\ntarget: cpu\ntargets: {cuda: {passes: {OrtTransformersOptimization: {op_level: 1}}}}",
        3,
        57,
        "unknown option 'op_level'",
        "'opt_level'",
    ),
    "targets, unknown option within": (
        "model: synthetic:sd15\ntarget: cpu\n"
        "targets: {cuda: {passes: {OrtTransformersOptimization: {optimization_options: {enable_nhwc: true}}}}}",
        3,
        80,
        "unknown option 'enable_nhwc'",
        "'enable_nhwc_conv'",
    ),
    "targets, passes as a list": (
        "model: synthetic:sd15\ntarget: cpu\ntargets: {cuda: {passes: []}}",
        3,
        26,
        "a map from pass name",
        None,
    ),
    "targets, change that is none": (
        "model: synthetic:sd15\ntarget: cpu\ntargets: {cuda: {passes: {LoraMerge: 3}}}",
        3,
        38,
        "map of options",
        None,
    ),
    "targets, change of the pass": (
        "model: synthetic:sd15\ntarget: cpu\ntargets: {cuda: {passes: {LoraMerge: {pass: x}}}}",
        3,
        39,
        "cannot replace a step's pass",
        None,
    ),
    "targets, evaluate": (
        "model: synthetic:sd15\ntarget: cpu\ntargets: {cuda: {evaluate: {image: {step: 1}}}}",
        3,
        37,
        "'step'",
        "'steps'",
    ),
    "no YAML": ("model: [a\ntarget: cpu", 2, 7, "not valid YAML", None),
    "a tab": ("model: a\n\ttarget: cpu", 2, 1, "a tab, where YAML takes only spaces", "indent with spaces"),
    "a control character": ("model: a\ntarget: c\x07pu", 2, 10, "U+0007", None),
    "a tag": (
        "model: synthetic:sd15\ntarget: !!python/name:os.system cpu",
        2,
        9,
        "tags are not supported",
        "leave the tag out",
    ),
    "a merge key": ("model: synthetic:sd15\ntarget: cpu\nevaluate: {<<: {}}", 3, 12, "merge keys", "extend"),
    "an alias to nothing": ("model: synthetic:sd15\ntarget: *cpu", 2, 9, "*cpu refers to nothing", None),
    "a leading zero": (
        "model: synthetic:sd15\ntarget: cpu\nevaluate: {latency: {runs: 010}}",
        3,
        28,
        "octal by some",
        "without",
    ),
    "a second document": ("model: synthetic:sd15\n---\ntarget: cpu", 2, 1, "a second YAML document", "one workflow"),
    "a list": ("- model: a", 1, 1, "this is not a workflow", None),
}


@pytest.mark.parametrize("mistake", TOP)
def test_a_mistake_at_the_top_is_reported_where_it_is(tmp_path: Path, mistake: str) -> None:
    models = tmp_path / "models"
    models.mkdir()
    for name in ("old.ckpt", "notes.txt", "lora1.safetensors", "lora2.safetensors"):
        (models / name).touch()
    text, line, column, message, remedy = TOP[mistake]
    # The chains come from a file of their own, so that no line or column moves.
    (tmp_path / "chains.yaml").write_text(CHAINS)
    tail = "" if mistake in ("a list", "a second document", "no YAML") else "\nextends: chains.yaml"
    problem = only_problem(tmp_path, text + tail)
    assert (problem.line, problem.column) == (line, column), problem
    assert message in problem.message
    assert remedy is None or (problem.remedy and remedy in problem.remedy)


CHAIN = {
    "no list": ("{}", 1, "a map from", None),
    "empty": ("[]", 1, "is empty", "null"),
    "step as text": ("[OnnxConversion]", 2, "a step must be a map", None),
    "step without pass": ("[{target_opset: 17}]", 2, "names no pass", "sdflow passes"),
    "pass of another type": ("[{pass: 3}]", 9, "`pass` must be the name of a pass", None),
    "unknown pass": ("[{pass: OnxConversion}]", 9, "unknown pass 'OnxConversion'", "'OnnxConversion'"),
    "missing file of a pass": ("[{pass: OnnxConversion}, {pass: own/p.py:X}]", 33, "no file 'own/p.py'", None),
    "unknown option": ("[{pass: OnnxConversion, opset: 17}]", 25, "unknown option 'opset'", "'target_opset'"),
    "option of another type": ("[{pass: OnnxConversion, target_opset: new}]", 39, "must be a valid integer", None),
    "option as text": ('[{pass: OnnxConversion, target_opset: "17"}]', 39, "found the text '17'", None),
    "option out of range": ("[{pass: OnnxConversion, target_opset: 9}]", 39, "greater than or equal to 14", None),
    "option of few values": ("[{pass: OnnxConversion, device: cdua}]", 33, "'cpu' or 'cuda'", "'cuda'"),
    "missing option": (
        "[{pass: OnnxConversion}, {pass: OrtTransformersOptimization}]",
        26,
        "'model_type' is required",
        None,
    ),
    "options that exclude each other": (
        "[{pass: OnnxConversion}, {pass: OnnxFloatToFloat16, op_block_list: [a], op_include_list: [b]}]",
        90,
        "cannot stand beside op_block_list",
        None,
    ),
    "an option of two types": (
        "[{pass: OnnxConversion}, {pass: OnnxFloatToFloat16, keep_io_types: no}]",
        68,
        "found the text 'no'",
        "true or false",
    ),
    "an item of an option's list": (
        "[{pass: OnnxConversion}, {pass: OnnxFloatToFloat16, op_block_list: [a, 3]}]",
        72,
        "'op_block_list.1'",
        "quotes",
    ),
    "expect of another type": ("[{pass: OnnxConversion, expect: [1]}]", 33, "`expect` must be a map", None),
    "expect with no count": ("[{pass: OnnxConversion, expect: {MatMul: some}}]", 42, "must be a count", None),
    "expect, true": ("[{pass: OnnxConversion, expect: {MatMul: true}}]", 42, "must be a count", None),
    "expect, negative": ("[{pass: OnnxConversion, expect: {MatMul: -1}}]", 42, "must be a count", None),
    "expect misspelt": ("[{pass: OnnxConversion, expct: {}}]", 25, "unknown option 'expct'", "'expect'"),
    "begins with an ONNX pass": ("[{pass: OnnxFloatToFloat16}]", 2, "starts from a checkpoint", "OnnxConversion"),
    "exports twice": ("[{pass: OnnxConversion}, {pass: OnnxConversion}]", 26, "can only begin a chain", None),
    "merges LoRAs twice": (
        "[{pass: OnnxConversion}, {pass: LoraMerge}, {pass: LoraMerge}]",
        45,
        "a second time",
        "w.yaml:1:106",
    ),
}


@pytest.mark.parametrize("mistake", CHAIN)
def test_a_mistake_in_a_chain_is_reported_where_it_is(tmp_path: Path, mistake: str) -> None:
    passes, column, message, remedy = CHAIN[mistake]
    if mistake == "no list":
        passes, message = "3", "must be a list of steps"
    problem = only_problem(tmp_path, HEAD + passes + "}}}")
    assert (problem.line, problem.column - len(HEAD)) == (1, column), problem
    assert message in problem.message
    assert remedy is None or (problem.remedy and remedy in problem.remedy)


SUBMODELS = {
    "of another type": ("submodels: 3", 3, 12, "`submodels` must be", None),
    "unknown": ("submodels: {unett: {passes: [{pass: OnnxConversion}]}}", 3, 13, "unknown submodel 'unett'", "'unet'"),
    "true": ("submodels: {unet: true}", 3, 19, "must be a map with `passes`", None),
    "without passes": ("submodels: {unet: {}}", 3, 19, "has no `passes`", None),
    "unknown key": ("submodels: {unet: {pases: [], passes: [{pass: OnnxConversion}]}}", 3, 20, "'pases'", "'passes'"),
    "changes to nothing": ("submodels: {unet: {passes: {LoraMerge: {}}}}", 3, 29, "no file has a list", "extend"),
    "LoRAs for the VAE": (
        "submodels: {vae_encoder: {passes: [{pass: OnnxConversion}, {pass: LoraMerge}]}}",
        3,
        60,
        "nothing to merge",
        None,
    ),
    "LoRA that no step merges": (
        "submodels: {unet: {passes: [{pass: OnnxConversion}]}}\nloras: [{file: hf:a/b}]",
        4,
        9,
        "no step merges",
        "LoraMerge",
    ),
}


@pytest.mark.parametrize("mistake", SUBMODELS)
def test_a_mistake_about_submodels_is_reported_where_it_is(tmp_path: Path, mistake: str) -> None:
    text, line, column, message, remedy = SUBMODELS[mistake]
    problem = only_problem(
        tmp_path, f"{{model: synthetic:sd15, target: cpu,\nevaluate: null,\n{text}\n}}".replace("\nloras", ",\nloras")
    )
    assert (problem.line, problem.column) == (line, column), problem
    assert message in problem.message
    assert remedy is None or (problem.remedy and remedy in problem.remedy)


@pytest.mark.parametrize("value", ["synthetic:sd15", "false", "{}"])
def test_what_a_model_may_lack_can_be_left_out_and_nothing_else(tmp_path: Path, value: str) -> None:
    text = "model: synthetic:sd35-tiny\ntarget: cpu\nevaluate: null\n"
    text += "submodels:\n  vae_decoder: {passes: [{pass: OnnxConversion}]}\n"
    (tmp_path / "w.yaml").write_text(text + "components: {text_encoder_3: null, vae: null}")
    (pipeline,) = load_workflow(tmp_path / "w.yaml", catalog=SmallCatalog()).pipelines
    assert pipeline.components == {"text_encoder_3": None}
    problem = only_problem(tmp_path, text + f"components: {{safety_checker: {value}}}")
    assert (problem.line, problem.column) == (6, 30) and "null, which leaves it out" in problem.message


def test_a_workflow_without_submodels_says_so(tmp_path: Path) -> None:
    assert "no `submodels`" in only_problem(tmp_path, "model: synthetic:sd15\ntarget: cpu").message


def test_all_errors_of_a_file_come_at_once(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(
        "modle: x\n"
        "model: hf:nobody\n"
        "target: [cpu, gpu]\n"
        "loras: [{file: none.safetensors}]\n"
        "submodels:\n"
        "  unet:\n"
        "    passes:\n"
        "      - {pass: OnnxConversion, target_opset: x, opset: 1}\n"
        "      - {pass: Onnx}\n"
        "      - {pass: OnnxConversion, expect: {MatMul: x}}\n"
        "evaluate: {latency: {runs: -1}, image: {steps: x}}\n"
    )
    places = [(found.line, found.column) for found in problems_of(tmp_path / "w.yaml")]
    assert places == [
        (1, 1), (2, 8), (3, 15), (4, 16), (8, 46), (8, 49), (9, 16), (10, 9), (10, 49), (11, 28), (11, 48)
    ]  # fmt: skip


def test_an_error_is_reported_even_when_there_is_no_target_to_build_for(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text("model: hf:x\nsubmodels: {unet: {passes: [{pass: Onnx}]}}\nevaluate: null")
    assert [(found.line, found.column) for found in problems_of(tmp_path / "w.yaml")] == [(1, 1), (1, 8), (2, 36)]


def test_an_error_in_a_file_that_is_extended_is_reported_in_that_file(tmp_path: Path) -> None:
    base = tmp_path / "base" / "b.yaml"
    base.parent.mkdir()
    base.write_text("evaluate:\n  image: {stepps: 3}\n" + CHAINS)
    (tmp_path / "w.yaml").write_text("extends: base/b.yaml\nmodel: synthetic:sd15\ntarget: cpu\n")
    (problem,) = problems_of(tmp_path / "w.yaml")
    assert (problem.file, problem.line, problem.column) == (str(base), 2, 11)


def test_syntax_errors_in_several_files_come_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: [")
    (tmp_path / "b.yaml").write_bytes(b"ok: 1\nname: caf\xe9")
    (tmp_path / "w.yaml").write_text("extends: [a.yaml, b.yaml, cc.yaml]")
    found = [(Path(problem.file).name, problem.line, problem.column) for problem in problems_of(tmp_path / "w.yaml")]
    assert found == [("a.yaml", 1, 9), ("b.yaml", 2, 10), ("w.yaml", 1, 27)]


FOREIGN = {
    "lines of text": b"root:x:0:0:hunter2:/root:/bin/bash\ndaemon:x:1:1:hunter2:/usr/sbin\n",
    "one word": b"hunter2",
    "a number": b"0123456",
    "settings": b"user: hunter2\npassword: hunter2\n",
    "settings that are no YAML": b"[client]\npassword=hunter2\nuser: [hunter2\n",
    "a list": b"- hunter2\n",
    "an alias": b"token: *hunter2\n",
    "a tag": b"token: !hunter2 x\n",
    "JSON": b'{"token": "hunter2"}',
    "an image": b"\x89PNG\r\n\x1a\nhunter2\xff",
    "UTF-16": "hunter2".encode("utf-16"),
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("text", ["extends: theirs\n", "refiner: {extends: theirs}\nextends: base.yaml\n"])
def test_a_file_to_extend_that_is_no_workflow_is_said_to_be_none_and_not_quoted(
    tmp_path: Path, kind: str, text: str
) -> None:
    (tmp_path / "theirs").write_bytes(FOREIGN[kind])
    (tmp_path / "base.yaml").write_text(CHAINS + "model: synthetic:sd15\ntarget: cpu\nevaluate: null\n")
    problem = only_problem(tmp_path, text)
    assert (problem.line, problem.column) == (1, text.index("theirs") + 1)
    assert "theirs' is not a workflow" in problem.message
    assert problem.remedy and "keys like model, target" in problem.remedy
    assert not any(part in str(problem) for part in ("hunter2", "password", "token", "0123456", "0x"))


def test_the_workflow_itself_is_not_quoted_where_it_is_none(tmp_path: Path) -> None:
    problem = only_problem(tmp_path, "root:x:0:0:hunter2\nmore hunter2\n")
    assert (problem.line, problem.column, problem.message) == (1, 1, "this is not a workflow")
    assert "hunter2" not in str(problem)


def test_a_mistake_in_what_reads_like_a_workflow_is_still_told_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_bytes("submodels: {}\nname: caf\xe9".encode("utf-16"))
    (tmp_path / "c.yaml").write_text("'target': [cpu")
    (tmp_path / "w.yaml").write_text("extends: [b.yaml, c.yaml]")
    found = [(Path(each.file).name, each.message.split(" ")[0]) for each in problems_of(tmp_path / "w.yaml")]
    assert found == [("b.yaml", "byte"), ("c.yaml", "not")]


def test_files_that_extend_each_other_in_a_circle_are_named(tmp_path: Path) -> None:
    for one, other in ("ab", "bc", "ca"):
        (tmp_path / f"{one}.yaml").write_text(f"extends: {other}.yaml")
    (problem,) = problems_of(tmp_path / "a.yaml")
    assert (Path(problem.file).name, problem.line, problem.column) == ("c.yaml", 1, 10)
    assert "a.yaml -> b.yaml -> c.yaml -> a.yaml" in problem.message


def test_a_missing_base_and_a_missing_workflow_name_the_nearest_file(tmp_path: Path) -> None:
    (tmp_path / "sd15.yaml").write_text("extends: sd51.yaml")
    (problem,) = problems_of(tmp_path / "sd15.yaml")
    assert (problem.line, problem.column, problem.remedy) == (1, 10, "did you mean 'sd15.yaml'?")
    (problem,) = problems_of(tmp_path / "sd1.yaml")
    assert (problem.line, problem.remedy) == (0, "did you mean 'sd15.yaml'?")


def test_a_change_to_a_step_that_the_extended_chain_has_not_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "chains.yaml").write_text(CHAINS)
    text = (
        "extends: chains.yaml\nmodel: synthetic:sd15\ntarget: cpu\nsubmodels:\n  unet:\n    passes:\n"
        "      OnnxFloatToFlot16: {keep_io_types: true}"
    )
    problem = only_problem(tmp_path, text)
    assert (problem.line, problem.column) == (7, 7)
    assert problem.remedy == "did you mean 'OnnxFloatToFloat16'?"


@pytest.mark.parametrize(
    ("override", "message", "remedy"),
    [
        ("unet.passes.OnnxConversion.opset=1", "unknown option 'opset'", "'target_opset'"),
        ("unet.passes.0.target_opset=x", "must be a valid integer", None),
        ("unet.passes.7.target_opset=16", "has no '7' (3 items, counted from 0)", None),
        ("unet.passes.OnnxConvertion.target_opset=16", "has no 'OnnxConvertion'", "'OnnxConversion'"),
        ("unett.passes.0.x=1", "unknown key 'unett'", "'unet'"),
        ("evaluate.latancy.runs=1", "unknown option 'latancy'", "'latency'"),
        ("model.seed=1", "`model` is not a map but the text 'synthetic:sd15'", None),
        ("model=sythetic:sd15", "'sythetic:'", "'synthetic'"),
        ("name=[", "not valid YAML", None),
        ("unet", "not in the form key=value", "unet.passes"),
        ("=3", "not in the form key=value", None),
        ("targets.cpu.evaluate=null", "'targets' cannot be set here", "set submodels or evaluate"),
    ],
)
def test_an_error_in_a_set_names_the_set(tmp_path: Path, override: str, message: str, remedy: str | None) -> None:
    path = tmp_path / "w.yaml"
    path.write_text("model: synthetic:sd15\ntarget: cpu" + CHAINS)
    (problem,) = problems_of(path, overrides=[override])
    assert (problem.file, problem.line) == (f"--set {override}", 0)
    assert message in problem.message
    assert remedy is None or (problem.remedy and remedy in problem.remedy)


def test_an_unknown_target_on_the_command_line_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text("model: synthetic:sd15\ntarget: cpu" + CHAINS)
    (problem,) = problems_of(path, targets=["cudaa"])
    assert (problem.file, problem.remedy) == ("--target cudaa", "did you mean 'cuda'?")
