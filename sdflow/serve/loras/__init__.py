"""LoRAs of a running server: merged into live sessions, by the same arithmetic as `sdflow bake`."""
