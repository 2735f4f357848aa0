"""Problems, prompt templates and deterministic batches."""
