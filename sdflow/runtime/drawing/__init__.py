"""Parts of a call: prompts, image prompts, VAE, previews."""
