"""Planning opens checkpoints: that must stay cheap."""

import subprocess
import sys
from pathlib import Path

HEAVY = {"numpy", "torch", "diffusers", "transformers", "huggingface_hub", "safetensors"}
CODE = """
import sys
import sdflow.sources
from sdflow.sources.loras.lora import lora_submodels
for reference in ("synthetic:sd15", "synthetic:sd15-tiny?seed=1"):
    sdflow.sources.open_checkpoint(reference, digests=sdflow.sources.PlainDigests(), download=False)
print(*sys.modules)
"""


def test_opening_a_checkpoint_imports_nothing_heavy() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", CODE], cwd=root, capture_output=True, text=True, check=True)
    assert "sdflow.sources.load" in done.stdout.split()
    assert not HEAVY & set(done.stdout.split())
