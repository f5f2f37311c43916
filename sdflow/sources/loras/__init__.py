"""LoRA files: formats, names, PEFT's configuration."""
