"""The norm of all queries together and of all keys against RMSNorm of each, whole and in the parts of ranks."""

from typing import Any

import pytest
import torch

from onegraph.ops.norm import rms_norm
from onegraph.ops.qk_norm import qk_mean_squares, qk_norm

QKV = torch.randn(2, 3, 100, generator=torch.Generator().manual_seed(0))
WEIGHT = 1 + 0.2 * torch.randn(80, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_keys_are_normed_apart_and_values_stay(dtype: torch.dtype) -> None:
    qkv = QKV.to(dtype)
    q, k, v = qkv.split((60, 20, 20), dim=-1)
    want = torch.cat((rms_norm(q, WEIGHT[:60], 1e-5), rms_norm(k, WEIGHT[60:], 1e-5), v), dim=-1)
    got = qk_norm(qkv, WEIGHT, qk_mean_squares(qkv, 60, 20, 1), 60, 1e-5)
    torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(got[..., 80:], v)


def test_what_ranks_have_adds_up_and_keys_of_several_count_once() -> None:
    """Three ranks: a third of the queries each, and all of them the one head of keys."""
    parts = [torch.cat((QKV[..., 20 * i : 20 * i + 20], QKV[..., 60:80]), dim=-1) for i in range(3)]
    got = sum(qk_mean_squares(part, 20, 20, 3) for part in parts)
    torch.testing.assert_close(got, qk_mean_squares(QKV, 60, 20, 1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qkv": QKV.double()}, r"qkv is \(2, 3, 100\) torch.float64; it must be contiguous float32, bfloat16 or"),
        ({"qkv": QKV[..., :90]}, r"qkv is \(2, 3, 90\) torch.float32; it must be contiguous"),
        ({"q_size": 81}, "queries take 81 and keys -1 of 100 numbers; queries need 1 or more, keys 0 or more"),
        ({"weight": torch.ones(101)}, "queries take 60 and keys 41 of 100 numbers; .* no more than there are"),
        ({"weight": torch.ones(80, 1)}, r"weight is \(80, 1\) torch.float32; it must be contiguous float32"),
        ({"mean_squares": torch.ones(2, 3)}, r"mean_squares is \(2, 3\) torch.float32; it must be .* \(2, 3, 2\)"),
        ({"mean_squares": torch.ones(2, 3, 2).half()}, r"mean_squares is \(2, 3, 2\) torch.float16; it must be"),
        ({"weight": torch.ones(80, device="meta")}, "weight is on meta, mean_squares on cpu and qkv on cpu; move them"),
        ({"eps": -1.0}, "eps is -1.0; it must be 0 or more"),
    ],
)
def test_qk_norm_refuses(change: dict[str, Any], words: str) -> None:
    given = {"qkv": QKV, "weight": WEIGHT, "mean_squares": torch.ones(2, 3, 2), "q_size": 60, "eps": 1e-5}
    with pytest.raises(ValueError, match=f"qk_norm: {words}"):
        qk_norm(**given | change)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [((0, 20, 1), "queries take 0 and keys 20 of 100"), ((60, 20, 0), "ranks is 0; it must be 1 or more")],
)
def test_qk_mean_squares_refuses(sizes: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=f"qk_mean_squares: {words}"):
        qk_mean_squares(QKV, *sizes)
