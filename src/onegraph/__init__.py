"""onegraph: the whole decode step of a low-bit LLM as one CUDA graph. Importing this touches neither CUDA nor torch.

`LLM` generates, `quantize` makes a checkpoint smaller, `plan` says what that takes, `verify` whether a checkpoint is
whole, `check_step` what keeps a step from being captured (docs/reference/python.md). Each is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onegraph.api.completion import Completion
    from onegraph.api.llm import LLM
    from onegraph.api.plan import Plan, plan
    from onegraph.api.quantize import Quantization, quantize
    from onegraph.api.verify import Verification, verify
    from onegraph.check.api import check_step
    from onegraph.engine.params import SamplingParams

__version__ = "0.2.0"
__all__ = [
    "LLM",
    "Completion",
    "Plan",
    "Quantization",
    "SamplingParams",
    "Verification",
    "__version__",
    "check_step",
    "plan",
    "quantize",
    "verify",
]

_HOMES = {
    "LLM": "onegraph.api.llm",
    "Completion": "onegraph.api.completion",
    "Plan": "onegraph.api.plan",
    "Quantization": "onegraph.api.quantize",
    "SamplingParams": "onegraph.engine.params",
    "Verification": "onegraph.api.verify",
    "check_step": "onegraph.check.api",
    "plan": "onegraph.api.plan",
    "quantize": "onegraph.api.quantize",
    "verify": "onegraph.api.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'onegraph' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
