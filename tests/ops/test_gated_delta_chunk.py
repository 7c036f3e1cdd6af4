"""Chunks of prompts of gated delta layers: Triton's kernels, compiled on a GPU, elsewhere interpreted."""

from typing import Any

import pytest
import torch
from torch import Tensor

GPU = torch.cuda.is_available()
pytest.importorskip("triton")
if not GPU:
    import interpreter_fixes  # noqa: F401

from onegraph.ops.calls import MAX_TOKENS, GatedDelta, Mamba2  # noqa: E402
from onegraph.ops.gated_delta import gated_delta  # noqa: E402
from onegraph.ops.mamba2 import _case as mamba2_case  # noqa: E402
from onegraph.ops.mamba2 import mamba2  # noqa: E402
from onegraph.ops.triton import mamba2 as kernels  # noqa: E402
from onegraph.ops.triton.gated_delta import chunk, supports  # noqa: E402
from test_gated_delta import Layer  # noqa: E402
from test_ops import clone, error, make, widen  # noqa: E402
from test_triton import poisoned_memory  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
CASES = [case for case in gated_delta.cases if "chunk" in case.name]


class Chunked(Layer):
    """A layer whose chunks Triton computes."""

    def step(self, call: GatedDelta) -> Tensor:
        return chunk(call) if call.qkv.shape[1] > MAX_TOKENS else super().step(call)


@pytest.mark.parametrize(
    ("case", "dtype"),
    zip(CASES, (torch.float32, torch.bfloat16, torch.float16), strict=True),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_triton_is_the_reference(case: Any, dtype: torch.dtype) -> None:
    args = make(case, dtype, DEVICE)
    truth, call = GatedDelta(*clone(args, widen(dtype))), GatedDelta(*clone(args))
    assert supports(call)
    want = gated_delta.reference(*truth)
    with poisoned_memory():
        got = chunk(call)
    for one, true in (
        (got, want), (call.state, truth.state), (call.ring, truth.ring), (call.base, truth.base)
    ):  # fmt: skip
        assert error(one, true) <= gated_delta.tolerance[dtype]


@pytest.mark.parametrize("case", mamba2.cases[-2:], ids=lambda case: case.name)
def test_mamba2_is_the_reference(case: Any) -> None:
    dtype = torch.bfloat16
    args = make(case, dtype, DEVICE)
    truth, call = Mamba2(*clone(args, widen(dtype))), Mamba2(*clone(args))
    assert supports(call)
    want = mamba2.reference(*truth)
    with poisoned_memory():
        got = kernels.chunk(call)
    for one, true in (
        (got, want), (call.state, truth.state), (call.ring, truth.ring), (call.base, truth.base)
    ):  # fmt: skip
        assert error(one, true) <= mamba2.tolerance[dtype]


@pytest.mark.parametrize("gate", [False, True])
def test_the_norm_of_groups(gate: bool) -> None:
    """Rows of three tokens, of which some are none, and a group that fills no power of two."""
    call = Mamba2(*make(mamba2_case("", 6, 2, (16, 16), [4, 5], [3, 0]), torch.float32, DEVICE))
    y = torch.randn(2, 3, 96, device=DEVICE)
    gated = (y * torch.nn.functional.silu(call.z) if gate else y).unflatten(2, (2, 48))
    want = (gated * (gated.square().mean(-1, keepdim=True) + call.eps).rsqrt()).flatten(2) * call.norm
    want[1] = 0
    before = call.base.clone()
    assert error(kernels.group_norm(y, call, gate), want) < 1e-6
    before[2] = 7 if gate else before[2]
    assert torch.equal(call.base, before)


def test_the_norm_of_a_group_that_is_wide() -> None:
    """All heads of Granite 4: a program has fewer tokens of them."""
    call = Mamba2(*make(mamba2_case("", 40, 1, (64, 16), [4, 5], [3, 1]), torch.float32, DEVICE))
    y = torch.randn(2, 3, 2560, device=DEVICE)
    want = y * (y.square().mean(-1, keepdim=True) + call.eps).rsqrt() * call.norm
    want[1, 1:] = 0
    assert error(kernels.group_norm(y, call), want) < 1e-6


@pytest.mark.parametrize("channels", [False, True])
def test_chunks_between_steps_are_the_recurrence(channels: bool) -> None:
    """Lengths beside a block's; decays of every size, tokens that come again and again, and junk in the slot."""
    layer = Chunked(heads=(2, 2), dims=(16, 32), limit=4, channels=channels).to(DEVICE)
    layer.a_log += 2
    text = layer.text(215)
    text[0][70:110] = text[0][70]
    out = layer.read(text, [9, 10, 14, 79, 143, 145, 212, 213, 215])
    truth, state = layer.truth(text)
    assert error(out, truth) < 2e-5
    assert error(layer.applied(1, 215), state) < 2e-5


def test_padding_and_rows_without_tokens_touch_no_state() -> None:
    layer = Chunked(dims=(16, 16)).to(DEVICE)
    text = layer.text(40)
    layer.read(text, [20, 22])
    before = [t.clone() for t in layer.written]
    none = tuple(x[:0] for x in text)
    layer.run((0, 0, tuple(x[:2] for x in text)), (1, 22, none), (0, 7, none), tokens=MAX_TOKENS + 1)
    for a, b in zip(before, layer.written, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
