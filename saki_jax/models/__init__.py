"""Qwen3 in flax.nnx: configuration, module, cache, sharding, Hugging Face files."""
