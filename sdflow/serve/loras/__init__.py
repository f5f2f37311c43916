"""LoRAs on a running server, merged into live sessions with the same arithmetic as `sdflow bake`."""
