"""How weights of each rotated format are rounded: what is coded together, and by what."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onegraph.formats.e8p import E8P, residual_dtype
from onegraph.formats.rotated import RotatedFormat
from onegraph.formats.trellis import TILE, TRELLIS
from onegraph.quant import trellis
from onegraph.quant.graphs import encoder
from onegraph.quant.ldlq import Encode, Rounded
from onegraph.quant.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Code:
    """Args:
    block, together: inputs, and outputs, that are coded together.
    encoder: (device, most columns of a call, rate, recipe, parts of them with a metric each, or 0) -> what encodes.
    stored: the codes of a layer as a checkpoint has them.
    """

    formats: Mapping[int, RotatedFormat]
    block: int
    together: int
    encoder: Callable[[torch.device, int, int, Recipe, int], Encode]
    stored: Callable[[Rounded, int], dict[str, Tensor]]


def _e8p(device: torch.device, n: int, bits: int, recipe: Recipe, metrics: int) -> Encode:
    return encoder(device, n, bits, recipe.wide, metrics)


def _e8p_stored(rounded: Rounded, bits: int) -> dict[str, Tensor]:
    codes, residual = rounded.codes
    found = {"codes": codes.T.to(torch.int16).contiguous()}
    if (dtype := residual_dtype(bits)) is not None:
        found["residual"] = residual.T.to(dtype).contiguous()
    return found


def _trellis(device: torch.device, n: int, bits: int, recipe: Recipe, metrics: int) -> Encode:
    return trellis.rounder(bits, trellis.AROUND if recipe.wide else trellis.AROUND_QUICK)


CODES = {
    "e8p": Code(formats=E8P, block=8, together=1, encoder=_e8p, stored=_e8p_stored),
    "trellis": Code(formats=TRELLIS, block=TILE, together=TILE, encoder=_trellis, stored=trellis.stored),
}
