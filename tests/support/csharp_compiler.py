"""Compiles C# with Roslyn: python csharp_compiler.py ROSLYN DOTNET OUT.dll [--with LIBRARY.dll] SOURCE...

A process of its own, since it loads .NET. ROSLYN is a folder that holds the compiler's assemblies, DOTNET one that holds .NET.
Without `--with` the sources become a library, with it a program. What the compiler calls an error is printed, a line each.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# What .NET 6 and later put in front of a program's files (ImplicitUsings).
IMPLIED = "".join(
    f"global using global::System{name};\n"
    for name in ("", ".Collections.Generic", ".IO", ".Linq", ".Net.Http", ".Threading", ".Threading.Tasks")
)
# `dotnet OUT.dll` reads it too.
RUNTIME = (
    '{"runtimeOptions": {"tfm": "netcoreapp3.1", "framework": {"name": "Microsoft.NETCore.App", "version": "%s"}}}'
)


def errors(roslyn: Path, framework: Path, out: Path, library: Path | None, sources: list[Path]) -> list[str]:
    import clr

    sys.path.append(str(roslyn))
    for name in ("Microsoft.CodeAnalysis", "Microsoft.CodeAnalysis.CSharp"):
        clr.AddReference(str(roslyn / f"{name}.dll"))
    from Microsoft.CodeAnalysis import DiagnosticSeverity, MetadataReference, OutputKind, SyntaxTree
    from Microsoft.CodeAnalysis.CSharp import (
        CSharpCompilation,
        CSharpCompilationOptions,
        CSharpParseOptions,
        CSharpSyntaxTree,
        LanguageVersion,
    )  # fmt: skip
    from System import Array
    from System.IO import File

    # A library as its package holds it for every .NET; a program as `dotnet run` takes it.
    kind, symbols, more = OutputKind.DynamicallyLinkedLibrary, ["NETSTANDARD", "NETSTANDARD2_0"], []
    if library is not None:
        kind, symbols, more = OutputKind.ConsoleApplication, ["NETCOREAPP"], [("implied.cs", IMPLIED)]
    reading = CSharpParseOptions(LanguageVersion.CSharp10).WithPreprocessorSymbols(Array[str](symbols))
    texts = [*((str(path), path.read_text(encoding="utf-8-sig")) for path in sources), *more]
    trees = [CSharpSyntaxTree.ParseText(text, reading, name) for name, text in texts]
    known = [path for path in framework.glob("*.dll") if path.name.startswith(("System.", "netstandard", "mscorlib"))]
    known += [framework / "Microsoft.CSharp.dll", *([library] if library else [])]
    made = CSharpCompilation.Create(
        out.stem,
        Array[SyntaxTree](trees),
        Array[MetadataReference]([MetadataReference.CreateFromFile(str(path)) for path in known]),
        CSharpCompilationOptions(kind).WithAllowUnsafe(library is None),
    )
    file = File.Create(str(out))
    try:
        found = made.Emit(file)
    finally:
        file.Close()
    return [str(each) for each in found.Diagnostics if each.Severity == DiagnosticSeverity.Error]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("roslyn", "dotnet", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--with", dest="library", type=Path)
    parser.add_argument("sources", type=Path, nargs="+")
    given = parser.parse_args()

    from clr_loader import get_coreclr
    from pythonnet import set_runtime

    (framework,) = (given.dotnet / "shared/Microsoft.NETCore.App").iterdir()
    config = given.out.with_suffix(".runtimeconfig.json")
    config.write_text(RUNTIME % framework.name, encoding="utf-8")
    set_runtime(get_coreclr(runtime_config=str(config), dotnet_root=str(given.dotnet)))
    found = errors(given.roslyn, framework, given.out, given.library, given.sources)
    print(*found, sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
