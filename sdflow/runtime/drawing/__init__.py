"""The parts of a call: prompts, image prompts, VAE, previews."""
