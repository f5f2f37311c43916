"""Output of `sdflow verify`, and the part of `sdflow run` that tells of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sdflow.report.output import print_json, print_table, put, put_verdict
from sdflow.units import spell_seconds
from sdflow.verify.finding import kinds
from sdflow.verify.result import spell_limit, worst_output

if TYPE_CHECKING:
    from sdflow.run.fix import Fix
    from sdflow.verify.result import OutputVerdict, SubmodelVerdict, Verification


def print_verifications(
    results: Sequence[Verification],
    *,
    as_json: bool,
    fixes: Mapping[str, Sequence[Fix]],
    quiet: bool = False,
    verbose: bool = False,
) -> None:
    """The verdict of each pipeline. fixes: pipeline -> what to put into its workflow. quiet: the verdict alone."""
    if as_json:
        proposed = {
            name: [{"submodel": each.submodel, each.option: each.nodes} for each in found]
            for name, found in fixes.items()
        }
        print_json("verification", {"pipelines": [result.to_json() for result in results], "fixes": proposed})
        return
    for result in results:
        if quiet:
            put_verdict(f"{result.name}: ", "passed" if result.passed else "FAILED")
        else:
            print_verification(result, verbose=verbose)
        for each in fixes.get(result.name, ()):
            put(f"{each.submodel} passes with {len(each.nodes)} nodes as they are ({each.tried} builds tried):")
            put(*each.yaml().split("\n"), wrap=False)


def print_verification(result: Verification, *, verbose: bool = False) -> None:
    """A line for each submodel, the image, and warnings. verbose: for each output, and what was covered."""
    title = f"{result.name}: verified for {result.target}, {result.level}"
    title += ", from the cache" if result.cached else f", in {spell_seconds(result.seconds)}"
    if verbose:
        _print_outputs(result, title)
    else:
        _print_submodels(result, title)
    _print_device(result, verbose=verbose)
    for what, image in (("image", result.image), ("image of base and refiner", result.ensemble)):
        if image is None:
            continue
        ours, plain = decibels(image.psnr), f" (fp16 PyTorch {decibels(image.float16_psnr)})"
        verdict = "passed" if not image.problems else "FAILED"
        if image.quantized and not image.problems:
            verdict = f"{image.quantized}, held to no limit"
        put_verdict(
            f"{what} {image.height}x{image.width}: PSNR {ours}{'' if image.quantized else plain}, SSIM {image.ssim:.4f}, "
            f"largest difference {image.largest_difference:.2g}: ",
            verdict,
        )
    if result.meaning is not None:
        meaning = result.meaning
        put(f"meaning: {meaning.artifact:.0%} of {meaning.cases} images are right, PyTorch's {meaning.reference:.0%}")
    if verbose:
        put(f"covered: {'; '.join(result.coverage)}")
    for kind in kinds(each for each in result.findings if each.level == "warning"):
        put(f"  {kind.where}: {kind.first.what}")
    for name, part in result.submodels.items():
        if part.block and part.block.gone:
            put(
                f"  {name}: {len(part.block.gone)} blocks before the first that differs have no end in the graph: fused"
            )
        if part.unproved:
            put(f"  {name}: not proved without its roundings: {part.unproved}")
        if part.left_out:
            put(f"  {name}: its fixed shapes leave out {', '.join(part.left_out)}")


def _print_submodels(result: Verification, title: str) -> None:
    columns, rows, numbers = verified_rows(result)
    print_table(title, columns, rows, right=numbers, below=("type",))


def verified_rows(result: Verification) -> tuple[tuple[str, ...], list[tuple[str, ...]], tuple[str, ...]]:
    """Columns, rows, and the columns that are numbers: a row for each submodel, with the output that comes nearest to its limit,
    or goes farthest beyond."""
    rows: list[tuple[str, ...]] = []
    for name, part in result.submodels.items():
        if not part.outputs:
            rows.append((name, part.precision, "", "", "", "FAILED"))
            continue
        worst = worst_output(part.outputs)
        rows.append(
            (
                name,
                part.precision,
                _counted(worst.name, len(part.outputs)),
                f"{worst.distance:.2e}",
                "not stated" if worst.limit is None else f"{worst.limit:.2e}",
                _verdict(part),
            )
        )
    numbers = ("distance", "at most")
    return ("submodel", "type", "worst output", *numbers, ""), rows, numbers


def _counted(name: str, outputs: int) -> str:
    return name if outputs == 1 else f"{name} ({outputs} outputs)"


def _verdict(part: SubmodelVerdict) -> str:
    if part.problems or not all([each.passed for each in part.outputs] + [each.passed for each in part.exact]):
        return "FAILED"
    return "within its limit" if part.quantized else "passed"


def _print_outputs(result: Verification, title: str) -> None:
    """A row for each output of each submodel, with everything that is known of it."""
    rows = [_row(part, output) for part in result.submodels.values() for output in part.outputs]
    rows += [
        (name, "", part.ran, "", "", "", "", "", "FAILED")
        for name, part in result.submodels.items()
        if not part.outputs
    ]
    numbers = ("unrounded", "distance", "fp16 PyTorch", "ratio", "at most")
    print_table(
        title,
        ("submodel", "output", "graph", *numbers, ""),
        rows,
        right=numbers,
        below=("graph", "unrounded", "fp16 PyTorch", "ratio"),
    )


def _print_device(result: Verification, *, verbose: bool) -> None:
    """What the provider's own kernels gave, beside what this CPU gave."""
    rows = []
    for part in result.submodels.values():
        if (device := part.device) is None:
            continue
        here = {each.name: each.distance for each in part.outputs}
        shown = device.outputs if verbose or not device.outputs else (worst_output(device.outputs),)
        for output in shown:
            ratio = f"{output.ratio:.2f}" if output.yardstick else ""
            beside = f"{output.distance / here[output.name]:.2f}" if here.get(output.name) else ""
            verdict = "passed" if output.passed else "FAILED"
            name = output.name if verbose else _counted(output.name, len(device.outputs))
            rows.append((part.name, name, device.target, f"{output.distance:.2e}", ratio, beside, verdict))
        if not device.outputs:
            rows.append((part.name, "", device.target, "", "", "", "FAILED"))
    if rows:
        numbers = ("distance", "of fp16 PyTorch's", "of the run above")
        tuned = next((part.device.tuned for part in result.submodels.values() if part.device and part.device.tuned), "")
        title = f"on the device, with the provider's kernels{f', tuned: {tuned}' if tuned else ''}"
        columns = ("submodel", "output" if verbose else "worst output", "on", *numbers, "")
        print_table(title, columns, rows, right=numbers, below=("on", "of the run above"))


def decibels(value: float | None) -> str:
    """ "59.2 dB"; None is for equal images."""
    return "inf" if value is None else f"{value:.1f} dB"


def _row(part: SubmodelVerdict, output: OutputVerdict) -> tuple[str, ...]:
    ratio = f"{output.ratio:.2f}" if output.yardstick else ""
    unrounded = "".join(f"{each.distance:.1e}" for each in part.exact if each.name == output.name)
    passed = output.passed and all(each.passed for each in part.exact if each.name == output.name)
    return (
        part.name,
        output.name,
        f"{part.precision}, {part.ran}",
        unrounded,
        f"{output.distance:.2e}",
        "" if part.quantized else f"{output.yardstick:.2e}",
        ratio,
        spell_limit(part, output),
        ("within its limit" if part.quantized else "passed") if passed else "FAILED",
    )
