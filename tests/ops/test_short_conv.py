"""The convolution of short contexts: torch's own over the whole text, and what a ring promises."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu

from onegraph.ops.calls import MAX_TOKENS
from onegraph.ops.short_conv import short_conv
from test_ops import error

CHANNELS = 12


def whole(x: Tensor, weight: Tensor, bias: Tensor | None, activated: bool, gated: bool) -> Tensor:
    """x [T, ...] of one text."""
    before, after, x = x.chunk(3, dim=1) if gated else (1, 1, x)
    padded = pad((before * x).T, (weight.shape[1] - 1, 0))
    out = conv1d(padded, weight.unsqueeze(1), bias, groups=CHANNELS).T
    return after * (silu(out) if activated else out)


@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("activated", "gated"), [(False, True), (True, False)])
def test_steps_that_are_partly_taken_back_are_torchs_convolution(
    width: int, bias: bool, activated: bool, gated: bool
) -> None:
    g = torch.Generator().manual_seed(0)
    text = torch.randn(40, CHANNELS * (3 if gated else 1), generator=g)
    weight, shift = torch.randn(CHANNELS, width, generator=g), torch.randn(CHANNELS, generator=g) if bias else None
    ring = torch.full((3, width - 1 + MAX_TOKENS, CHANNELS), torch.nan)
    slots, outs, at = torch.tensor([2, 0], dtype=torch.int32), [], 0
    for tokens, kept in [(13, 13), (1, 1), (8, 3), (4, 4), (8, 1), (7, 6), (12, 12)]:
        x = text[at : at + tokens].repeat(2, 1, 1)
        positions, counts = (torch.tensor(v, dtype=torch.int32) for v in ([at, at], [tokens, tokens]))
        outs.append(short_conv(x, weight, shift, ring, slots, positions, counts, activated, gated)[0, :kept])
        at += kept
    assert at == 40
    assert error(torch.cat(outs), whole(text, weight, shift, activated, gated)) < 1e-6
    assert ring[:2].isnan().all(), "slot 0 belongs to no sequence, slot 1 to another one"


def test_what_does_not_fit_is_refused() -> None:
    ints = [torch.zeros(1, dtype=torch.int32)] * 3
    x, weight, ring = torch.zeros(1, 2, CHANNELS), torch.zeros(CHANNELS, 3), torch.zeros(2, 4, CHANNELS)
    short_conv(x, weight, None, ring, *ints, False, False)
    with pytest.raises(ValueError, match="12 columns; 12 channels need 12, or 36 where gated"):
        short_conv(x, weight, None, ring, *ints, False, True)
    with pytest.raises(ValueError, match="ring has 3 places; a convolution of width 3 over 2 tokens needs 4"):
        short_conv(x, weight, None, ring[:, :3].contiguous(), *ints, False, False)
    with pytest.raises(ValueError, match=r"ring is \(2, 4, 6\) torch.float32"):
        short_conv(x, weight, None, ring[..., :6].contiguous(), *ints, False, False)
    with pytest.raises(ValueError, match=r"bias is \(3,\) torch.float32; it must be float32 \[12\]"):
        short_conv(x, weight, torch.zeros(3), ring, *ints, False, False)
    with pytest.raises(ValueError, match="its tokens evenly apart"):
        short_conv(torch.zeros(2, 3, CHANNELS)[:, :2], weight, None, ring, *(torch.zeros(2, dtype=torch.int32),) * 3,
                   False, False)  # fmt: skip
