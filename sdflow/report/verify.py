"""Output of `sdflow verify`, and the part of `sdflow run` that tells of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sdflow.report.output import print_json, print_table, put
from sdflow.units import spell_seconds
from sdflow.verify.kinds import kinds
from sdflow.verify.result import spell_limit

if TYPE_CHECKING:
    from sdflow.run.fix import Fix
    from sdflow.verify.result import OutputVerdict, SubmodelVerdict, Verification


def print_verifications(results: Sequence[Verification], *, as_json: bool, fixes: Mapping[str, Sequence[Fix]]) -> None:
    """The verdict of each pipeline. fixes: pipeline -> what to put into its workflow."""
    if as_json:
        proposed = {
            name: [{"submodel": each.submodel, each.option: each.nodes} for each in found]
            for name, found in fixes.items()
        }
        print_json("verification", {"pipelines": [result.to_json() for result in results], "fixes": proposed})
        return
    for result in results:
        print_verification(result)
        for each in fixes.get(result.name, ()):
            put(f"{each.submodel} passes with {len(each.nodes)} nodes as they are ({each.tried} builds tried):")
            put(*each.yaml().split("\n"), wrap=False)


def print_verification(result: Verification) -> None:
    """A line for each output of each submodel, the image, what was covered, and warnings."""
    rows = [_row(part, output) for part in result.submodels.values() for output in part.outputs]
    rows += [
        (name, "", part.ran, "", "", "", "", "", "FAILED")
        for name, part in result.submodels.items()
        if not part.outputs
    ]
    title = f"{result.name}: verified for {result.target}, {result.level}"
    title += ", from the cache" if result.cached else f", in {spell_seconds(result.seconds)}"
    numbers = ("unrounded", "distance", "fp16 PyTorch", "ratio", "at most")
    print_table(
        title,
        ("submodel", "output", "graph", *numbers, ""),
        rows,
        right=numbers,
        below=("graph", "unrounded", "fp16 PyTorch", "ratio"),
    )
    _print_device(result)
    for what, image in (("image", result.image), ("image of base and refiner", result.ensemble)):
        if image is None:
            continue
        ours, plain = decibels(image.psnr), f" (fp16 PyTorch {decibels(image.float16_psnr)})"
        verdict = "passed" if not image.problems else "FAILED"
        if image.quantized and not image.problems:
            verdict = f"{image.quantized}, held to no limit"
        put(
            f"{what} {image.height}x{image.width}: PSNR {ours}{'' if image.quantized else plain}, SSIM {image.ssim:.4f}, "
            f"largest difference {image.largest_difference:.2g}: {verdict}"
        )
    if result.meaning is not None:
        meaning = result.meaning
        put(f"meaning: {meaning.artifact:.0%} of {meaning.cases} images are right, PyTorch's {meaning.reference:.0%}")
    put(f"covered: {'; '.join(result.coverage)}")
    for kind in kinds(each for each in result.findings if each["level"] == "warning"):
        put(f"  {kind.where}: {kind.what}")
    for name, part in result.submodels.items():
        if part.block and part.block.gone:
            put(
                f"  {name}: {len(part.block.gone)} blocks before the first that differs have no end in the graph: fused"
            )
        if part.unproved:
            put(f"  {name}: not proved without its roundings: {part.unproved}")
        if part.left_out:
            put(f"  {name}: its fixed shapes leave out {', '.join(part.left_out)}")


def _print_device(result: Verification) -> None:
    """What the provider's own kernels gave, beside what this CPU gave."""
    rows = []
    for part in result.submodels.values():
        if (device := part.device) is None:
            continue
        here = {each.name: each.distance for each in part.outputs}
        for output in device.outputs:
            ratio = f"{output.ratio:.2f}" if output.yardstick else ""
            beside = f"{output.distance / here[output.name]:.2f}" if here.get(output.name) else ""
            verdict = "passed" if output.passed else "FAILED"
            rows.append((part.name, output.name, device.target, f"{output.distance:.2e}", ratio, beside, verdict))
        if not device.outputs:
            rows.append((part.name, "", device.target, "", "", "", "FAILED"))
    if rows:
        numbers = ("distance", "of fp16 PyTorch's", "of the run above")
        tuned = next((part.device.tuned for part in result.submodels.values() if part.device and part.device.tuned), "")
        title = f"with the provider's own kernels{f', tuned: {tuned}' if tuned else ''}"
        print_table(title, ("submodel", "output", "on", *numbers, ""), rows, right=numbers)


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
