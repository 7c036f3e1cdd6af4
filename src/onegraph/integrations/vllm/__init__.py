"""onegraph's checkpoints in vLLM: `vllm serve CHECKPOINT` finds the quantization by itself (docs/vllm.md).

vLLM calls `register` in every process that it starts, through the entry point `vllm.general_plugins`. What costs time
to import (ops, the layers' methods) is imported when a checkpoint of ours is really loaded.
"""

import logging

OLDEST = (0, 32)  # the oldest release that the tests run against
TESTED = "0.32.0 (CPU) and 0.33.0 (CUDA)"


def register() -> None:
    """Makes vLLM know the quantization "onegraph". Cheap, may be called again, and never raises: it also runs
    where people serve other models, with a vLLM whose interfaces have moved."""
    try:
        from onegraph.integrations.vllm import config as _  # noqa: F401, registers on import
    except ImportError as error:
        logging.getLogger("vllm").warning(
            "onegraph: this vLLM cannot serve onegraph's checkpoints (%s); tested: %s", error, TESTED
        )


def unsupported() -> str | None:
    """Why the installed vLLM cannot serve our checkpoints, in words; None where it can."""
    import vllm

    if vllm.__version_tuple__[:2] < OLDEST and vllm.__version_tuple__[0] != "dev":
        oldest = ".".join(map(str, OLDEST))
        return f"onegraph serves with vLLM {oldest} or newer (tested: {TESTED}), got {vllm.__version__}; upgrade vLLM"
    return None
