"""onegraph checkpoints in transformers: `import onegraph.integrations.hf`, then `from_pretrained` as ever.

Importing this package registers the quantization method and the attention `turboquant` with transformers, and wraps
`save_pretrained` for models of the method (saving.py): transformers has no entry point through which it could find us
by itself. LoRA of peft takes our layers from then on (lora.py). It is the one import of onegraph that has an effect.
"""

from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)

from onegraph.integrations.hf import cache, experts, lora, saving
from onegraph.integrations.hf.cache import TurboQuantCache
from onegraph.integrations.hf.quantizer import METHOD, OnegraphConfig, OnegraphQuantizer

__all__ = ["OnegraphConfig", "OnegraphQuantizer", "TurboQuantCache"]


def _register() -> None:
    if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(METHOD)(OnegraphConfig)
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(METHOD)(OnegraphQuantizer)
    cache.register()
    experts.register()
    saving.register()
    lora.register()


_register()
