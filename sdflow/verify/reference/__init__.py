"""The reference: PyTorch, diffusers and PEFT themselves, and the inputs they are run on."""
