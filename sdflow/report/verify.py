"""Output of `sdflow verify`, and its part in that of `sdflow run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sdflow.report.output import print_json, print_table, put, put_verdict
from sdflow.run.fix import Fix
from sdflow.units import spell_seconds
from sdflow.verify.finding import kinds
from sdflow.verify.report.rows import DEVICES, NUMBERS, OUTPUTS, SUBMODELS, device_rows, output_rows, submodel_rows
from sdflow.verify.result import Verification


def print_verifications(
    results: Sequence[Verification],
    *,
    as_json: bool,
    fixes: Mapping[str, Sequence[Fix]],
    quiet: bool = False,
    verbose: bool = False,
) -> None:
    """The verdict of each pipeline. fixes: pipeline -> lines for its workflow. quiet: only the verdict."""
    if as_json:
        proposed = {
            name: [{"submodel": each.submodel, each.option: [*each.existing, *each.nodes]} for each in found]
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
            put(f"{each.submodel} passes with {len(each.nodes)} nodes unconverted ({each.tried} builds tried):")
            put(*each.yaml().split("\n"), wrap=False)


def print_verification(result: Verification, *, verbose: bool = False) -> None:
    """A line per submodel, the image, and warnings. verbose: per output, with the coverage."""
    title = f"{result.name}: verified for {result.target}, {result.level}"
    title += ", from the cache" if result.cached else f", in {spell_seconds(result.seconds)}"
    if verbose:
        shown = [_narrow(row) for row in output_rows(result)]
        print_table(title, _narrow(OUTPUTS), shown, NUMBERS, below=("graph", "unrounded", "fp16 PyTorch", "ratio"))
    else:
        print_table(title, SUBMODELS, submodel_rows(result), NUMBERS, below=("type",))
    tuned, rows = device_rows(result, worst=not verbose)
    if rows:
        shown, columns = [_narrow(row) for row in rows], _narrow(DEVICES)
        columns[1] = "output" if verbose else "worst output"
        title = f"on the device, with the provider's kernels{tuned}"
        print_table(title, columns, shown, NUMBERS, below=("on", "vs CPU run"))
    for what, image in (("image", result.image), ("image of base and refiner", result.ensemble)):
        if image is None:
            continue
        ours, plain = decibels(image.psnr), f" (fp16 PyTorch {decibels(image.float16_psnr)})"
        verdict = "passed" if not image.problems else "FAILED"
        if image.quantized and not image.problems:
            verdict = f"{image.quantized}, without a limit"
        put_verdict(
            f"{what} {image.height}x{image.width}: PSNR {ours}{'' if image.quantized else plain}, SSIM {image.ssim:.4f}, "
            f"largest difference {image.largest_difference:.2g}: ",
            verdict,
        )
    if result.meaning is not None:
        meaning = result.meaning
        put(
            f"content: {meaning.artifact:.0%} of {meaning.cases} images match their prompts; "
            f"{meaning.reference:.0%} of PyTorch's do"
        )
    if verbose:
        put(f"covered: {'; '.join(result.coverage)}")
    for kind in kinds(each for each in result.findings if each.level == "warning"):
        put(f"  {kind.where}: {kind.first.what}")
    for name, part in result.submodels.items():
        if part.block and part.block.gone:
            put(
                f"  {name}: {len(part.block.gone)} blocks before the first that differs were not compared: "
                "their outputs were fused"
            )
        if part.unproved:
            put(f"  {name}: not verified without rounding: {part.unproved}")
        if part.left_out:
            put(f"  {name}: not verified, because its shapes are fixed: {', '.join(part.left_out)}")


def _narrow(cells: Sequence[str]) -> list[str]:
    """Drop the last column but one, for which only a page has room."""
    return [*cells[:-2], cells[-1]]


def decibels(value: float | None) -> str:
    """ "59.2 dB"; None means equal images."""
    return "inf" if value is None else f"{value:.1f} dB"
