"""The weight formats, and the `quantization_config` that tells which layers are stored in which of them."""

from collections.abc import Mapping
from typing import Any, Protocol

from onegraph.formats.e8p import E8PConfig
from onegraph.formats.exl3 import EXL3Config
from onegraph.formats.files import quote
from onegraph.formats.fused import BlocksConfig
from onegraph.formats.int4_config import INT4Config
from onegraph.formats.published import Published
from onegraph.formats.rotated import RotatedConfig
from onegraph.formats.trellis import TrellisConfig
from onegraph.formats.weight import Quantization


class _Parser(Protocol):
    @staticmethod
    def matches(data: Mapping[str, Any]) -> bool: ...
    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Quantization: ...


OWN: dict[str, type[RotatedConfig]] = {each.format: each for each in (E8PConfig, TrellisConfig)}  # written by onegraph
CONFIGS: tuple[type[_Parser], ...] = (*OWN.values(), INT4Config, EXL3Config, BlocksConfig, Published)  # registration


def parse_quantization(data: object) -> Quantization | None:
    """The `quantization_config` of a config.json; None where there is none.

    Raises ValueError for a method that no format reads, and for keys or values that make no sense.
    """
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise ValueError(f"quantization_config is {type(data).__name__}; it must be an object")
    for config in CONFIGS:
        if config.matches(data):
            return config.from_dict(data)
    raise ValueError(
        f"quantization_config has quant_method {quote(data.get('quant_method'), 80)}, which is not supported; load the "
        "unquantized model, one that onegraph quantized, or one in FP8, NVFP4, MXFP4, INT4 or EXL3 (fp8, modelopt, "
        "compressed-tensors, mxfp4, awq, gptq, exl3)"
    )
