"""Mamba2: transformers' layer on a whole text, in steps and chunks, with drafts that are taken back."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from onegraph.ops.calls import MAX_TOKENS, Mamba2
from onegraph.ops.mamba2 import mamba2
from test_ops import error

HEADS, GROUPS, P, N, WIDTH = 4, 2, 16, 24, 4
INNER, WIDE = HEADS * P, HEADS * P + 2 * GROUPS * N


@pytest.fixture(scope="module")
def layer() -> Any:
    nemotron = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    torch.manual_seed(0)
    config = nemotron.NemotronHConfig(
        hidden_size=32, mamba_num_heads=HEADS, mamba_head_dim=P, n_groups=GROUPS, ssm_state_size=N, conv_kernel=WIDTH,
        chunk_size=16, layers_block_type=["mamba"], use_conv_bias=True, num_hidden_layers=1, time_step_min=0.05,
    )  # fmt: skip
    made = nemotron.NemotronHMamba2Mixer(config, 0).eval()
    for parameter in made.parameters():
        parameter.data.normal_(std=0.5)
    made.norm.weight.data.add_(1)
    made.out_proj = torch.nn.Identity()
    return made


def state(slots: int = 3, depth: int = 2 * MAX_TOKENS) -> tuple[Tensor, ...]:
    """Of slots that held anything: NaN is what nothing but a choice removes."""
    nan = torch.nan
    return (
        torch.full((slots, WIDTH - 1 + MAX_TOKENS, WIDE), nan), torch.full((slots, HEADS, P, N), nan),
        torch.full((slots, HEADS), 999, dtype=torch.int32), torch.full((slots, depth, GROUPS, N), nan),
        torch.full((slots, depth, HEADS, P), nan), torch.full((slots, depth, HEADS, 1), nan),
    )  # fmt: skip


def call(layer: Any, projected: Tensor, held: tuple[Tensor, ...], position: int, limit: int) -> Mamba2:
    z, xbc, dt = projected.unsqueeze(0).split((INNER, WIDE, HEADS), dim=2)
    ints = (torch.tensor([v], dtype=torch.int32) for v in (2, position, len(projected)))
    data = {name: p.data for name, p in layer.named_parameters()}
    return Mamba2(
        xbc, z, dt, data["conv1d.weight"].squeeze(1), data["conv1d.bias"], data["A_log"], data["dt_bias"], data["D"],
        data["norm.weight"], layer.norm.variance_epsilon, *held, *ints, limit, layer.time_step_limit[0],
    )  # fmt: skip


@pytest.mark.parametrize("limit", [0, 8])
def test_steps_and_chunks_are_transformers_layer(layer: Any, limit: int) -> None:
    x = torch.randn(1, 120, 32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want, projected = layer(x)[0], layer.in_proj(x)[0]
    held, outs, at = state(), [], 0
    for tokens, kept in ((3, 3), (1, 1), (70, 70), (8, 2), (4, 1), (1, 1), (9, 9), (4, 4), (8, 8), (5, 1), (20, 20)):
        drafted = projected[at : at + tokens].clone()
        drafted[kept:] = torch.nan
        outs.append(mamba2(*call(layer, drafted, held, at, limit))[0, :kept])
        at += kept
    assert at == 120
    assert error(torch.cat(outs), want) < 1e-5
    assert held[1][:2].isnan().all(), "another sequence's slot, or nobody's"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dt": torch.zeros(1, 1, 3)}, r"dt is torch.float32 \(1, 1, 3\) on cpu; it must be torch.float32 \(1, 1, 4\)"),
        ({"weight": torch.zeros(9, 4)}, "4 heads of 16 and 2 groups of 24 need 160"),
        ({"skip": torch.zeros(5)}, r"skip is \(5,\) torch.float32; it must be float32 \[4\]"),
        ({"keys": torch.zeros(3, 16, 3, 24)}, "4 heads and 3 kv heads"),
        ({"limit": 16}, "from 0 to 15 may wait"),
    ],
)
def test_what_does_not_fit_is_refused(layer: Any, change: dict[str, Any], why: str) -> None:
    given = replace(call(layer, torch.zeros(1, INNER + WIDE + HEADS), state(), 0, 0), **change)
    with pytest.raises(ValueError, match=why):
        mamba2(*given)
