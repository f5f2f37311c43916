"""Command lookup by name, with a suggestion for unknown ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

from sdflow.cli.help import GroupedCommands

SYNONYMS = {
    "build": "run", "make": "run", "compile": "run", "convert": "run", "optimize": "run", "start": "run",
    "draw": "generate", "txt2img": "generate", "img2img": "generate", "image": "generate",
    "new": "init", "create": "init", "check": "validate", "lint": "validate", "dry-run": "plan", "diff": "explain",
    "test": "selftest", "benchmark": "bench", "measure": "bench", "info": "inspect", "show": "inspect",
    "lora": "bake", "merge": "bake", "server": "serve", "stop": "terminate", "ps": "status", "devices": "targets",
    "providers": "targets", "list": "cache ls", "ls": "cache ls", "clean": "cache clean", "gc": "cache gc",
    "version": "--version", "help": "--help",
}  # fmt: skip
"""Names that other programs use -> our commands."""
CACHE_SYNONYMS = {
    "list": "ls", "show": "ls", "check": "verify", "prune": "gc", "shrink": "gc", "clear": "clean", "purge": "clean",
    "rm": "clean", "remove": "clean", "upload": "push", "download": "pull", "fetch": "pull", "keygen": "key",
}  # fmt: skip


_TYPERS: Any = typer.BadParameter.__mro__[1]
"""click's UsageError, which typer does not export by name."""


@contextmanager
def _our_usage_errors(command: Callable[[], str]) -> Iterator[None]:
    """Replace typer's usage errors by ours, so that all errors look alike. A command without arguments shows its help
    as before. command: returns the path of the command, for errors that do not name it."""
    try:
        yield
    except _TYPERS as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        from sdflow.errors import UsageError

        path = command() if error.ctx is None else error.ctx.command_path
        command_path = path.removeprefix("python -m ")
        what = error.format_message().removesuffix(".")
        remedy = f"See {command_path} --help."
        raise UsageError(f"{what[:1].lower()}{what[1:]}", where=command_path, remedy=remedy) from None


class Commands(GroupedCommands):
    """The commands of `sdflow`."""

    synonyms = SYNONYMS

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **more: Any) -> Any:
        with _our_usage_errors(lambda: " ".join(filter(None, (parent and parent.command_path, info_name)))):
            return super().make_context(info_name, args, parent, **more)

    def invoke(self, ctx: Any) -> Any:
        with _our_usage_errors(lambda: " ".join(filter(None, (ctx.command_path, ctx.invoked_subcommand)))):
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Raises UsageError for an unknown command, and suggests the nearest."""
        if not args or args[0] in self.commands:
            return super().resolve_command(ctx, args)
        from sdflow.errors import UsageError

        path = ctx.command_path.removeprefix("python -m ")
        meant = self._meant(args[0])
        remedy = f"See {path} --help." if meant is None else f"Did you mean {path} {meant}?"
        raise UsageError(f"there is no command {args[0][:100]!r}", where=path, remedy=remedy)

    def _meant(self, name: str) -> str | None:
        typed = name.casefold()
        if typed in self.synonyms:
            return self.synonyms[typed]
        if (given := self._for_file(name)) is not None:
            return given
        close = get_close_matches(typed[:100], [*self.commands, *self.synonyms], n=1)
        return self.synonyms.get(close[0], close[0]) if close else None

    def _for_file(self, name: str) -> str | None:
        """The command for a file or folder given in a command's place."""
        suffix = Path(name).suffix.lower()
        if suffix in (".yaml", ".yml"):
            return f"run {name}"
        if suffix in (".safetensors", ".gguf", ".ckpt"):
            return f"init --model {name}"
        return f"generate {name}" if name.startswith("pipelines/") else None


class CacheCommands(Commands):
    """The commands of `sdflow cache`."""

    synonyms = CACHE_SYNONYMS

    def _for_file(self, name: str) -> str | None:
        return None
