"""onegraph: the whole decode step of a low-bit LLM as one CUDA graph. Importing this touches neither CUDA nor torch."""

__version__ = "0.1.0"
