"""`--help`: commands and options in groups, an example for each command, nothing truncated.

`GROUPS` holds each command's group and example, `PANELS` each option's group: add new names there. Arguments that only one
family has are grouped under the family's title.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from sdflow.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Sequence

GROUPS: Mapping[str, Mapping[str, str]] = {
    "Build": {
        "init": "sdflow init --model dreamshaper.safetensors --target cuda",
        "validate": "sdflow validate workflow.yaml",
        "plan": "sdflow plan workflow.yaml",
        "lock": "sdflow lock workflow.yaml",
        "run": "sdflow run sd15 --target cuda",
        "verify": "sdflow verify pipelines/sd15-cuda --html report.html",
        "provenance": "sdflow provenance pipelines/sd15-cuda",
        "explain": "sdflow explain workflow.yaml --step BindWeights",
        "bake": "sdflow bake --base pipelines/sd15 --lora ink.safetensors --out pipelines/ink",
        "sign": "sdflow sign pipelines/sd15-cuda --key signing.pem",
        "export": "sdflow export pipelines/sd15-cuda --one-file sd15.onnx",
    },
    "Share": {
        "push": "sdflow push oci://ghcr.io/me/fox:1 pipelines/fox-cuda",
        "pull": "sdflow pull oci://ghcr.io/me/fox:1",
    },
    "Generate and serve": {
        "generate": 'sdflow generate pipelines/sd15-cuda -p "a red fox in the snow" --seed 7',
        "serve": "sdflow serve pipelines/sd15-cuda --port 8000",
        "deploy": "sdflow deploy fox pipelines/sd15-cuda",
        "query": 'sdflow query fox "a red fox in the snow" --images 4',
        "status": "sdflow status",
        "terminate": "sdflow terminate fox",
    },
    "Measure": {
        "bench": "sdflow bench pipelines/sd15-cuda --steps 20 --out results",
        "tune": "sdflow tune pipelines/sd15-cuda",
        "selftest": "sdflow selftest --target cuda --report mine",
        "doctor": "sdflow doctor",
    },
    "Look up": {
        "inspect": "sdflow inspect ink.safetensors",
        "targets": "sdflow targets",
        "passes": "sdflow passes OrtTransformersOptimization",
        "schema": "sdflow schema > sdflow.schema.json",
        "cache": "",
    },
}
"""Group -> command -> its example, in the order of the list of commands."""

CACHE_GROUPS: Mapping[str, Mapping[str, str]] = {
    "This machine": {
        "ls": "sdflow cache ls",
        "verify": "sdflow cache verify",
        "gc": "sdflow cache gc --max-size 50GB --dry-run",
        "clean": "sdflow cache clean --yes",
        "engines": "sdflow cache engines --clear",
    },
    "Shared with other machines": {
        "push": "sdflow cache push workflow.yaml --url s3://bucket/sdflow",
        "pull": "sdflow cache pull workflow.yaml --url s3://bucket/sdflow",
        "key": "sdflow cache key signing.pem",
        "export": "sdflow cache export all.sdflow --structures sd15,sdxl --target cuda",
        "import": "sdflow cache import all.sdflow",
    },
}

_AFTER_FAMILIES = "Approximations"
_OF_EVERY_MODEL: Mapping[str, str] = {
    "Prompt": "prompt prompts negative_prompt prompt_syntax wildcards embeddings embedding_folder prompt_2 "
    "negative_prompt_2 prompt_3 negative_prompt_3 max_sequence_length clip_skip allow_pickle",
    "Image": "settings_from images size height width seed steps guidance_scale scheduler eta batch",
    "Starting from an image": "image mask mask_blur strength whole",
    "Reference images": "references reference",
    "ControlNet and IP-Adapter": "controls guess_mode image_prompts",
    "SDXL": "original_size crops_coords_top_left target_size refiner refiner_start aesthetic_score negative_aesthetic_score",
    "Approximations": "reuse guidance_interval",
    "Model": "model lora base fits submodel structures pipeline show",
    "Build": "overrides copy jobs rebuild evaluate locked keep_failed require_target",
    "Verification": "verify full fresh fix run_on memory require_verified check checker",
    "Measurement": "engine list_engines warmup rounds tuning first_limit option compare force",
    "Network and access": "host port api_key_file admin_key_file no_auth cors_origin allowed_host forwarded_allow_ips root_path "
    "ssl_certfile ssl_keyfile drain_timeout open_page plain_http",
    "Pipelines": "alias default pipeline_folder pipeline_memory",
    "LoRAs of requests": "loras lora_memory max_uploads max_upload_gb",
    "Limits of requests": "max_queue deadline stall max_images max_steps max_pixels max_chunks max_cost max_body max_connections",
    "Scheduling": "batch_sizes lanes",
    "Ray cluster": "replicas gpus queue take_over",
    "Graph": "one_file browser ort file_size schedule schedule_file open_schedule negative text embed",
    "Hardware": "target on threads devices low_memory keep device_memory vae_tiles",
    "Cache": "cache rehash engine_cache remote url push pull clear yes older_than max_size dry_run",
    "Signature": "key certificate sigstore identity_token trust_config signature trust",
    "Output": "out overwrite results html report collect sheet preview previews log_prompts traces interactive quiet verbose "
    "json",
}


def _panels() -> dict[str, str]:
    """Insert a group per family with arguments of its own, titled after it."""
    listed = {name for names in _OF_EVERY_MODEL.values() for name in names.split()}
    of_families = {
        family.title: " ".join(own)
        for family in FAMILIES.values()
        if (own := [name for name in family.arguments if name not in listed])
    }
    found: dict[str, str] = {}
    for panel, names in _OF_EVERY_MODEL.items():
        found |= of_families if panel == _AFTER_FAMILIES else {}
        found[panel] = names
    return found


PANELS: Mapping[str, str] = _panels()
"""Group of options -> parameter names, in display order. All others appear under "Options"."""

_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names.split()}
_ORDER = [*_PANEL_OF]
_FEW = 6
"""Up to this many options need no groups."""
_TYPES = {"int": "N", "float": "X", "str": "TEXT", "Path": "PATH", "path": "PATH"}
EXIT_STATUS = (
    "0 done; 1 `doctor` found a problem; 2 bad usage or workflow; 3 a pass failed; 4 verification failed; 5 the target is "
    "required and not available; 130 interrupted."
)


def arrange(app: typer.Typer, groups: Mapping[str, Mapping[str, str]]) -> None:
    """Give the commands of an app their groups, their order and their examples."""
    placed = {name: (panel, example) for panel, commands in groups.items() for name, example in commands.items()}
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__
        command.cls = GroupedCommand
        command.rich_help_panel, command.epilog = placed[name]
    for group in app.registered_groups:
        group.rich_help_panel, _ = placed[group.name or ""]
    app.registered_commands.sort(key=lambda each: list(placed).index(each.name or each.callback.__name__))  # type: ignore[union-attr]


def first_sentence(command: Any) -> str:
    """A command's summary in the list of commands."""
    text = " ".join((command.help or "").split("\n\n")[0].split())
    return re.split(r"\.(?:\s|$)", text)[0]


class GroupedCommand(TyperCommand):
    """A command with its options in groups, and an example below them."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [each for each in self.get_params(ctx) if each.param_type_name == "argument"]
        return ["[OPTIONS]", *(_argument(each) for each in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        shown = [(each, record) for each in self.get_params(ctx) if (record := each.get_help_record(ctx)) is not None]
        arguments = [
            (_argument(each), record[1].replace("[required]", "").strip())
            for each, record in shown
            if each.param_type_name == "argument"
        ]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        options = [(each, record) for each, record in shown if each.param_type_name == "option"]
        options.sort(key=lambda pair: _ORDER.index(pair[0].name) if pair[0].name in _PANEL_OF else len(_ORDER))
        panels: dict[str, list[tuple[str, str]]] = {}
        for each, (name, text) in options:
            panel = _PANEL_OF.get(each.name, "Options") if len(options) > _FEW else "Options"
            panels.setdefault(panel, []).append(
                (_typed(name), _switch(text) if getattr(each, "is_flag", False) else text)
            )
        order = [*PANELS, "Options"]
        for panel in sorted(panels, key=order.index):
            with formatter.section(panel):
                formatter.write_dl(panels[panel], col_max=28)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.epilog:
            with formatter.section("Example"):
                formatter.write(f"{' ' * formatter.current_indent}{self.epilog}\n")


class GroupedCommands(TyperGroup):
    """The list of commands in groups, each with one whole sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            panels.setdefault(command.rich_help_panel, []).append((name, first_sentence(command)))
        widest = max(len(name) for rows in panels.values() for name, _ in rows)
        order = [*GROUPS, *CACHE_GROUPS]
        for panel in sorted(panels, key=order.index):
            with formatter.section(panel):
                formatter.write_dl([(name.ljust(widest), text) for name, text in panels[panel]])


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name.upper()).strip("[].")
    name += "..." if parameter.nargs != 1 else ""
    return name if parameter.required else f"[{name}]"


def _typed(option: str) -> str:
    """ "--steps N" for "--steps <int range>"."""

    def short(found: re.Match[str]) -> str:
        words: Sequence[str] = re.findall(r"\w+", found[0])
        return next((_TYPES[each] for each in words if each in _TYPES), found[0])

    return re.sub(r"<[^>]*>", short, option)


def _switch(text: str) -> str:
    """Show the default of a switch as "on" or "off", where click shows the option's name."""
    return re.sub(r"\[default: (no-)?[\w-]+\]", lambda found: f"[default: {'off' if found[1] else 'on'}]", text)
