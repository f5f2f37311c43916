"""The reference: PyTorch, diffusers and PEFT themselves, and their inputs."""
