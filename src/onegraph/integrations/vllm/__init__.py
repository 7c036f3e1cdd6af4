"""onegraph's checkpoints in vLLM: `vllm serve CHECKPOINT` finds the quantization by itself (docs/guides/vllm.md).

vLLM calls `register` in every process that it starts, through the entry point `vllm.general_plugins`. What costs time
to import (ops, the layers' methods) is imported when a checkpoint of ours is really loaded.
"""

import logging

OLDEST = (0, 32)  # the oldest release that the tests run against
KNOWN = (0, 32), (0, 33)  # whose decoder layers `fused.py` stands in for, and draft layers `mtp.py`
TESTED = "0.32.0 (CPU) and 0.33.0 (CUDA)"
FUSED = {f"{name}ForCausalLM": f"Onegraph{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
DRAFTS = {  # vLLM's draft layers behind the last -> those of `mtp.py`
    "DeepSeekMTPModel": "OnegraphDeepSeekMTP", "Glm4MoeMTPModel": "OnegraphGlm4MoeMTP", "DeepseekV32MTPModel": None,
}  # fmt: skip
KV_RATES = {"turboquant:4": (4, 4), "turboquant:k4v3": (4, 3), "turboquant:k3v4": (3, 4), "turboquant:3": (3, 3)}
KV_RATES |= {"turboquant:k4v2": (4, 2), "turboquant:k3v2": (3, 2), "turboquant:2": (2, 2)}


def register() -> None:
    """Makes vLLM know the quantization "onegraph". Cheap, may be called again, and never raises: it also runs
    where people serve other models, with a vLLM whose interfaces have moved."""
    try:
        from onegraph.integrations.vllm import config as _  # noqa: F401, registers on import

        _register_models()
        _register_kv_cache()
    except ImportError as error:
        logging.getLogger("vllm").warning(
            "onegraph: this vLLM cannot serve onegraph's checkpoints (%s); tested: %s", error, TESTED
        )


def fuses() -> bool:
    """Whether this vLLM is one whose layers we know: to fuse norms and sums into the linears of decoder layers, and to
    build draft layers in codes."""
    import vllm

    return vllm.__version_tuple__[:2] in KNOWN


def _register_models() -> None:
    """Our classes of vLLM's models, by name: imported when a checkpoint of ours asks for one."""
    from vllm.model_executor.models.registry import ModelRegistry

    for module, names in (("fused", FUSED), ("mtp", DRAFTS)):
        for name in filter(None, names.values()):
            if name not in ModelRegistry.models:
                ModelRegistry.register_model(name, f"{__name__}.{module}:{name}")


def _register_kv_cache() -> None:
    """`--kv-cache-dtype turboquant:4 --attention-backend CUSTOM`, where vLLM lets a cache have a dtype of its own (0.33
    and newer; older ones refuse the name themselves) and nobody else is the custom backend."""
    try:
        from vllm.config.cache import register_kv_cache_dtype
    except ImportError:
        return
    import torch
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.kv_cache_interface import KVQuantMode

    class Handler:
        name = ""

        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> KVQuantMode:
            return KVQuantMode.CUSTOM

    if AttentionBackendEnum.CUSTOM.is_overridden():
        return
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.turboquant.TurboQuantBackend")
    for name in KV_RATES:
        register_kv_cache_dtype(name)(type("TurboQuantHandler", (Handler,), {"name": name}))


def unsupported() -> str | None:
    """Why the installed vLLM cannot serve our checkpoints, in words; None where it can."""
    import vllm

    if vllm.__version_tuple__[:2] < OLDEST and vllm.__version_tuple__[0] != "dev":
        oldest = ".".join(map(str, OLDEST))
        return f"onegraph serves with vLLM {oldest} or newer (tested: {TESTED}), got {vllm.__version__}; upgrade vLLM"
    return None
