"""The reference: the PyTorch model in fp32 and in plain fp16, on inputs from a real denoising run.

The pipeline is diffusers' own; nothing that builds an artifact (tracing, recipes, passes) is involved. Submodels are
compared on the recorded inputs of diffusers' run, and the fp16 modules get the same inputs. Text encoders compute
attention operator by operator ("eager"), like an exported graph without fusions. One stage is in memory at a time: the
text encoders, then the denoiser with the decoder, then each remaining submodel.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from sdflow.families.shared.image_prompts import adapter_count, reads_layers
from sdflow.verify.as_json import as_json
from sdflow.verify.reference.cases import Cases, write_cases
from sdflow.verify.reference.forwards import Call, Network, recording, run_cases, trajectory
from sdflow.verify.reference.half import quick_halves
from sdflow.verify.reference.inputs import (
    IMAGE_SCALE,
    Recorded,
    checker_cases,
    control_images,
    decoder_cases,
    encoder_cases,
    first_latents,
    further_denoiser_cases,
    prompter_cases,
    shown_images,
    text_cases,
)
from sdflow.verify.reference.once import denoise_once, rows_once
from sdflow.verify.reference.reference_request import ReferenceRequest
from sdflow.verify.reference.stages import Progress, Stages
from sdflow.verify.reference.torch_images import (
    IMAGE_FILE,
    Embeddings,
    control_arguments,
    draw_by_torch,
    draw_sample,
    embeddings_in,
    sample_cases,
)

VERSION = 6
"""Part of a reference's key. Increase it whenever results change."""
USES = ("diffusers", "numpy", "peft", "torch", "transformers")


def compute(request: ReferenceRequest, progress: Progress) -> dict[str, Any]:
    """Write the cases of every submodel, and the images, into `request.out`."""
    import torch

    run, selection = ReferenceRun(request, progress), request.selection
    family = run.family
    with torch.no_grad():
        results, texts = run.encode()
        gc.collect()
        if not {*selection.submodels} <= {*family.text}:
            shown, cases = run.show()
            results |= cases
            gc.collect()
            results |= run.denoise(texts, shown)
            gc.collect()
        for submodel, cases_of in ((family.encoder, run.encoder), (family.checker, run.checker)):
            if submodel is not None and submodel in selection.submodels:
                results[submodel] = cases_of(submodel)
                gc.collect()
    kept = {name: cases for name, cases in results.items() if name in selection.submodels}
    write_cases(request.out, kept, {"selection": as_json(selection), "merged": run.merged})
    return {"cases": {name: len(cases.cases) for name, cases in kept.items()}}


@dataclass(frozen=True)
class _Texts:
    """The encoded prompts: of the image in float32 and in float16, and of the sample's images."""

    float32: Embeddings
    float16: Embeddings
    sample: Embeddings | None


@dataclass(frozen=True)
class Shown:
    """Image prompts as diffusers' call arguments, already projected, so that the denoiser's stage needs no image
    encoder. Empty without adapters."""

    float32: Mapping[str, Any]
    float16: Mapping[str, Any]


class ReferenceRun(Stages):
    """The stages of a reference. Each loads what it needs and releases it."""

    def encode(self) -> tuple[dict[str, Cases], _Texts]:
        """The cases of the text encoders, and the encoded prompts."""
        selection = self.selection
        networks, pipeline = self.stage(self.family.text_of(self.request.loads))
        streamed = {name: each for name, each in networks.items() if each.weights is not None}
        rows = [rows_once(each, self.rounded(name)) for name, each in streamed.items()]

        def encoded(prompts: Sequence[str], guided: bool) -> Embeddings:
            return self.encoded(pipeline, prompts, guided=guided)

        def recorded(prompts: Sequence[str]) -> Recorded:
            with recording(networks) as calls:
                encoded(prompts, guided=False)
            return {name: inputs for name, inputs, _ in calls}

        if rows:
            self.progress("reference: all prompts, in float32 and in 16 bits")
            encoded(selection.prompts, guided=False)
        results = text_cases(recorded, selection)
        exact = encoded(selection.prompts[:1], self.guided)
        sample = (
            encoded([case.prompt for case in sample_cases(selection)], self.guided) if selection.sample_cases else None
        )
        self._run_float32(networks, results)
        for each in rows:
            each.forget()
        with self.in_half(networks, results):
            half = encoded(selection.prompts[:1], self.guided)
        return results, _Texts(exact, half, sample)

    def encoded(self, pipeline: Any, prompts: Sequence[str], *, guided: bool) -> Embeddings:
        """Encode the prompts with diffusers' pipeline."""
        more = self.selection.text_arguments
        return self.family.encode_reference(pipeline, prompts, self.configs, guided=guided, **more)

    def show(self) -> tuple[Shown, dict[str, Cases]]:
        """The image prompts as the denoiser's inputs, and the cases of the image encoder."""
        import torch

        family, selection = self.family, self.selection
        count = adapter_count(self.configs[family.denoiser])
        if not count:
            return Shown({}, {}), {}
        (name,) = family.prompters(self.request.loads)
        networks, pipeline = self.stage((name,))
        network, images = networks[name], shown_images(selection, count)

        def tokens() -> dict[str, Any]:
            embeds = []
            for image, projection in zip(images, network.module.image_proj, strict=True):
                found = pipeline.encode_image(image, "cpu", 1, reads_layers(projection))
                positive, negative = (projection(each)[None] for each in found)
                embeds.append(torch.cat([negative, positive]) if self.guided else positive)
            return {"ip_adapter_image_embeds": embeds}

        exact = tokens()
        processor = self.companions["feature_extractor"]
        pixels = [processor(image, return_tensors="pt").pixel_values.numpy() for image in images]
        results = {name: prompter_cases(selection, pixels, network)}
        self._run_float32(networks, results)
        with self.in_half(networks, results):
            half = tokens()
        return Shown(exact, half), results

    def set_scales(self, pipeline: Any, shown: Shown) -> None:
        """Set the scale of each IP-Adapter, if there are any."""
        if shown.float32:
            pipeline.set_ip_adapter_scale([IMAGE_SCALE] * len(shown.float32["ip_adapter_image_embeds"]))

    def denoise(self, texts: _Texts, shown: Shown) -> dict[str, Cases]:
        """The cases of the denoiser and the decoder; the image goes to IMAGE_FILE."""
        import torch

        family, selection = self.family, self.selection
        nets = self.nets
        networks, pipeline = self.stage((family.denoiser, family.decoder, *nets))
        denoiser, decoder = networks[family.denoiser], networks[family.decoder]
        if denoiser.weights is not None and not nets and not shown.float32 and texts.sample is None:
            return self._denoise_once(networks, pipeline, texts)
        self.progress("reference: denoising in float32")
        latents = first_latents(selection, self.latents.channels)
        controls = control_images(selection, len(nets), self.latents.scale)
        start = {**self.start(pipeline, torch.from_numpy(latents)), **control_arguments(controls)}
        self.set_scales(pipeline, shown)
        with recording({name: networks[name] for name in (family.denoiser, *nets)}) as calls:
            image = draw_by_torch(pipeline, selection, texts.float32, {**start, **shown.float32})
        stepped = {name: trajectory(calls, name, networks[name]) for name in (family.denoiser, *nets)}
        for name, cases in stepped.items():
            further_denoiser_cases(cases, selection, networks[name])
        denoiser_cases = stepped[family.denoiser]
        of_decoder = decoder_cases(selection, denoiser_cases, denoiser, decoder, self.latents)
        results = {**stepped, family.decoder: of_decoder}
        self._run_float32(networks, results)
        if texts.sample is not None:
            self.progress("reference: images of the sample")
            draw_sample(
                pipeline, selection, texts.sample, {**control_arguments(controls), **shown.float32}, self.request.out
            )
        with self.in_half(networks, results):
            self.progress("reference: denoising in 16 bits")
            dtype = denoiser.module.dtype  # diffusers passes values between them without a cast
            for network in networks.values():
                network.module.to(dtype)
            given = embeddings_in(texts.float16, dtype)
            half_image = draw_by_torch(pipeline, selection, given, {**start, **shown.float16})
        np.savez(self.request.out / IMAGE_FILE, latents=latents, float32=image, float16=half_image)
        return results

    def _denoise_once(self, networks: Mapping[str, Network], pipeline: Any, texts: _Texts) -> dict[str, Cases]:
        """Like `denoise`, for a denoiser read piece by piece, each piece once for several runs."""
        import torch

        family, selection, name = self.family, self.selection, self.family.denoiser
        decoder = networks[family.decoder]
        rounded = {each: self.rounded(each) for each in (name, family.decoder)}
        self.progress("reference: denoising, in float32 and in 16 bits")
        latents = first_latents(selection, self.latents.channels)
        half_pipeline = self.pipeline(rounded, own_scheduler=True)
        dtype = rounded[name].module.dtype  # diffusers passes values between them without a cast
        rounded[family.decoder].module.to(dtype)
        given = {"float32": (pipeline, texts.float32), "float16": (half_pipeline, embeddings_in(texts.float16, dtype))}

        def draw(kind: str) -> np.ndarray:
            engine, prompts = given[kind]
            return draw_by_torch(engine, selection, prompts, self.start(engine, torch.from_numpy(latents)))

        with recording({name: networks[name]}) as calls:
            cases, images = denoise_once(
                name,
                (networks[name], self.network(name), rounded[name]),
                self.request.half_of(name),
                {kind: partial(draw, kind) for kind in given},
                calls,
                lambda call: self._expected_calls(call, len(pipeline.scheduler.timesteps)),
                lambda cases: further_denoiser_cases(cases, selection, networks[name]),
            )
        arrays: Any = {"latents": latents, **images}
        np.savez(self.request.out / IMAGE_FILE, **arrays)
        of_decoder = decoder_cases(selection, cases, networks[name], decoder, self.latents)
        results = {name: cases, family.decoder: of_decoder}
        self._run_float32(networks, results)
        with self.in_half(networks, results):
            return results

    def _expected_calls(self, call: Call, timesteps: int) -> int | None:
        """The number of denoiser calls for the image, from the first one: one per timestep of the scheduler; PNDM and
        Heun have more timesteps than steps. With guidance the two texts share one call or have separate ones, some of
        which a pipeline may skip."""
        _, inputs, _ = call
        rows = len(next(iter(inputs.values())))
        return timesteps if rows > 1 or not self.guided else None

    def encoder(self, submodel: str) -> Cases:
        """The cases of the VAE encoder."""
        network = self.stage((submodel,))[0][submodel]
        return self._both(encoder_cases(self.selection, self._image(), network), submodel, network)

    def checker(self, submodel: str) -> Cases:
        """The cases of the safety checker."""
        networks, pipeline = self.stage((submodel,))
        with recording(networks) as calls:
            pipeline.run_safety_checker(self._image(), "cpu", networks[submodel].module.dtype)
        ((_, inputs, _),) = calls
        return self._both(checker_cases(self.selection, inputs, networks[submodel]), submodel, networks[submodel])

    def _both(self, cases: Cases, submodel: str, network: Network) -> Cases:
        networks, results = {submodel: network}, {submodel: cases}
        self._run_float32(networks, results)
        with self.in_half(networks, results):
            return cases

    def _run_float32(self, networks: Mapping[str, Network], results: Mapping[str, Cases]) -> None:
        for name, network in networks.items():
            self.progress(f"reference: {name} in float32")
            run_cases(results[name], "float32", network)

    @contextmanager
    def in_half(self, networks: Mapping[str, Network], results: Mapping[str, Cases]) -> Iterator[None]:
        """Convert the modules to 16 bits for good, and run the given cases."""
        for name, network in networks.items():
            network.to_half(self.request.half_of(name))
        with quick_halves(*(network.module for network in networks.values())):
            for name, network in networks.items():
                if name in results:
                    half = self.request.half_of(name)
                    self.progress(f"reference: {name} in {half}")
                    run_cases(results[name], "float16", network, half)
            yield

    def _image(self) -> np.ndarray:
        """The generated image, (1, height, width, 3) in [0, 1]."""
        with np.load(self.request.out / IMAGE_FILE) as stored:
            image: np.ndarray = stored["float32"][None]
        return image
