"""Whether the verdict on a CUDA artifact, reached on a CPU, is the one that the real kernels give.

    python benchmarks/verify_on_gpu.py GRAPHS [--size 32] [--timesteps 999 500 1] [--submodels unet vae_decoder text_encoder]

GRAPHS: as for `benchmarks/image_latency.py`. For each submodel, with the same random weights and inputs: relative L2 distance to
PyTorch in float32 of the artifact as sdflow runs it on CUDA (our kernels, captured), of the artifact lowered to the CPU,
and of PyTorch in float16. The first two must agree within a fifth, and both must be at most 1.2 times the third; else the
exit status is 1.
Needs torch with CUDA, diffusers, transformers, onnx and onnxruntime-gpu.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from image_latency import SUBMODELS, bind, modules

AGREEMENT, LIMIT = 0.2, 1.2
Feeds = dict[str, np.ndarray]
Run = Callable[[Feeds], np.ndarray]


def inputs(name: str, config: Any, size: int, timesteps: list[int], generator: torch.Generator) -> list[Feeds]:
    """Float32 and integer inputs of a submodel under the artifact's names."""

    def normal(*shape: int) -> np.ndarray:
        return torch.randn(*shape, generator=generator).half().float().numpy()

    if name == "text_encoder":
        ids = torch.randint(0, config.vocab_size, (2, config.max_position_embeddings), generator=generator)
        return [{"input_ids": ids.numpy()}]
    if name == "vae_decoder":
        return [{"latent_sample": normal(1, config.latent_channels, size, size)}]
    text = normal(2, 77, config.cross_attention_dim)
    return [
        {"sample": normal(2, config.in_channels, size, size), "timestep": np.array([t]), "encoder_hidden_states": text}
        for t in timesteps
    ]


def pytorch(name: str, module: Any, dtype: torch.dtype) -> Run:
    """The first output of a PyTorch module on the GPU."""

    def run(feeds: Feeds) -> np.ndarray:
        values = {k: torch.from_numpy(v).cuda() for k, v in feeds.items()}
        values = {k: v.to(dtype) if v.is_floating_point() else v for k, v in values.items()}
        with torch.no_grad():
            if name == "unet":
                out = module(values["sample"], values["timestep"], values["encoder_hidden_states"], return_dict=False)
            elif name == "vae_decoder":
                out = module.decode(values["latent_sample"], return_dict=False)
            else:
                out = module(values["input_ids"].long(), return_dict=False)
        return out[0].float().cpu().numpy()

    return run


def artifact(session: Any) -> Run:
    """The first output of an ONNX Runtime session."""
    types = {
        "tensor(float16)": np.float16,
        "tensor(float)": np.float32,
        "tensor(int32)": np.int32,
        "tensor(int64)": np.int64,
    }

    def run(feeds: Feeds) -> np.ndarray:
        cast = {value.name: feeds[value.name].astype(types[value.type]) for value in session.get_inputs()}
        return session.run(None, cast)[0].astype(np.float32)

    return run


def distance(values: list[np.ndarray], reference: list[np.ndarray]) -> float:
    """Relative L2 over all inputs together."""
    error = sum(float(((a.astype(np.float64) - b) ** 2).sum()) for a, b in zip(values, reference, strict=True))
    return (error / sum(float((b.astype(np.float64) ** 2).sum()) for b in reference)) ** 0.5


def engines(name: str, module: Any, folder: Path) -> Mapping[str, Callable[[], Run]]:
    """The engines of one submodel, each made when its turn comes."""
    import onnx

    from sdflow.runtime.folder import load_submodel
    from sdflow.targets import TARGETS
    from sdflow.verify.lowering import lower, session_of

    def cuda() -> Run:
        submodel = load_submodel(folder.parent, name, TARGETS["cuda"])
        return lambda feeds: next(iter(submodel(**feeds).values())).astype(np.float32)

    def lowered() -> Run:
        model = onnx.load(str(folder / "model.onnx"), load_external_data=False)
        return artifact(session_of(lower(model), folder))

    return {
        "float16": lambda: pytorch(name, copy.deepcopy(module).half(), torch.float16),
        "cuda": cuda,
        "lowered": lowered,
    }


def main() -> int:
    """Print a row for each submodel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("--size", type=int, default=32, help="latents along each side")
    parser.add_argument("--timesteps", type=int, nargs="+", default=[999, 500, 1])
    parser.add_argument("--submodels", nargs="+", choices=SUBMODELS, default=list(SUBMODELS))
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    made = modules(options.graphs, "cuda")
    failed = False
    print(f"{'submodel':14} {'cuda':>10} {'lowered':>10} {'float16':>10}  lowered/cuda  cuda/float16", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.submodels:
            module = made[SUBMODELS[name]]
            bind(options.graphs / name, module.state_dict(), Path(folder) / name)
            feeds = inputs(name, module.config, options.size, options.timesteps, torch.Generator().manual_seed(11))
            exact = [pytorch(name, module, torch.float32)(each) for each in feeds]
            found, seconds = {}, {}
            for engine, make in engines(name, module, Path(folder) / name).items():
                begun = time.perf_counter()
                run = make()
                found[engine] = distance([run(each) for each in feeds], exact)
                seconds[engine] = time.perf_counter() - begun
            agreement, ratio = found["lowered"] / found["cuda"], found["cuda"] / found["float16"]
            wrong = abs(agreement - 1) > AGREEMENT or max(found["cuda"], found["lowered"]) > LIMIT * found["float16"]
            failed |= wrong
            print(
                f"{name:14} {found['cuda']:10.3e} {found['lowered']:10.3e} {found['float16']:10.3e}"
                f"  {agreement:12.3f}  {ratio:12.3f}  {'WRONG' if wrong else 'agree'}"
                f"  ({', '.join(f'{key} {value:.0f} s' for key, value in seconds.items())})",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
