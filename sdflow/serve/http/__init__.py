"""HTTP: routes, fields, limits and errors of the OpenAI, A1111 and LoRA APIs."""
