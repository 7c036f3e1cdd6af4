"""Linears of vLLM's tensor-parallel ranks that sum over all of them in their own launch (`ops/exchange.py`).

    vllm serve MODEL --tensor-parallel-size 2 --additional-config '{"onegraph_exchange": true}'

Each rank is a process, which opens the others' peer buffers (`onegraph.nn.processes`). Sums of up to 64 tokens use
them, longer ones vLLM's all-reduce. Not the default: it has run with few models.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tp_group

from onegraph.nn.processes import PeerProcess
from onegraph.ops.exchange import all_reduce

SETTING = "onegraph_exchange"
TOKENS = 64  # of a sum that crosses through inboxes

_LINEARS: dict[str, tuple[Any, PeerProcess, Any]] = {}  # what an op's name stands for


def exchange_of(vllm_config: Any, hidden: int, dtype: torch.dtype) -> PeerProcess | None:
    """Of the model whose ranks' sums are [tokens, hidden] of `dtype`; None where it is not asked for."""
    asked, ranks = vllm_config.additional_config, get_tp_group()
    if not isinstance(asked, dict) or not asked.get(SETTING) or ranks.world_size == 1:
        return None

    def gather(told: Any) -> list[Any]:
        found = [None] * ranks.world_size
        torch.distributed.all_gather_object(found, told, group=ranks.cpu_group)
        return found

    words = TOKENS * hidden * dtype.itemsize // 4
    try:
        return PeerProcess(words, ranks.rank_in_group, ranks.world_size, ranks.device, gather)
    except ValueError as error:
        raise ValueError(f"{SETTING}: {error}: leave it out") from None


def sum_over_ranks(linear: Any, exchange: PeerProcess) -> None:
    """From now on `linear`, a row-parallel one whose parts are one layer, has a name for `linear_sum`."""
    ranks = get_tp_group()
    linear.onegraph.sum_name = f"{linear.prefix}@{ranks.unique_name}"
    _LINEARS[linear.onegraph.sum_name] = linear, exchange, ranks


def _run(x: Tensor, add: Tensor | None, silu: bool, name: str) -> Tensor:
    linear, exchange, ranks = _LINEARS[name]
    slots = linear.onegraph.slots
    part = slots.parts[0]
    weight, first = slots.given(linear, None, after_norm=False), exchange.group[3] == 0
    bias, tokens = linear.bias if first else None, x.shape[:-1].numel()
    x = x.contiguous()
    if 1 <= tokens <= TOKENS:
        run = part.ops.all_reduce
        found: Tensor | None = None
        if run is not None:
            found = run(part.format, x, weight, bias, add, silu, exchange.group)
        if found is None:
            found = all_reduce(
                part.ops.linear(part.format, x, weight, bias, None, None, silu, False), add, *exchange.group
            )
        return found
    own = part.ops.linear(part.format, x, weight, bias, add if first else None, None, silu, False)
    whole: Tensor = ranks.all_reduce(own)
    return whole


def _fake(x: Tensor, add: Tensor | None, silu: bool, name: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], _LINEARS[name][0].output_size)


_LIBRARY = torch.library.Library("onegraph_vllm", "DEF")
_LIBRARY.define("linear_sum(Tensor x, Tensor? add, bool silu, str name) -> Tensor")
for _backend in ("CPU", "CUDA"):
    _LIBRARY.impl("linear_sum", _run, _backend)
torch.library.register_fake("onegraph_vllm::linear_sum", _fake, lib=_LIBRARY)
linear_sum = torch.ops.onegraph_vllm.linear_sum
"""x [..., k] ([..., 2k] with `silu`) of this rank -> the sum of all ranks' linears plus `add`, [..., n]. One opaque op,
since how it crosses depends on how many tokens there are. name: `OnegraphState.sum_name` of the linear."""
