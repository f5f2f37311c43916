"""Components from other sources: a different VAE or denoiser, ControlNets, IP-Adapters."""
