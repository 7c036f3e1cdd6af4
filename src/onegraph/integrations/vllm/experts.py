"""Routed experts of our formats in vLLM's fused-MoE layer: its router chooses, its runner sums over ranks, one op of
ours runs what was chosen.

A checkpoint holds all experts of a layer in two stacks (`formats/fused.py`), each tensor with the experts in front. A
stack is loaded expert by expert into slots, as a linear is (`shards.py`): ranks of tensor parallelism cut every expert,
its gate rows and its up rows each by themselves; ranks of expert parallelism hold whole experts.

Parameters have vLLM's names of the two matrices, and tensors are renamed before a model sees them (`stack_mapper`).
Most models pass what is below `experts` to `load_weights` of the layer; DeepSeek's looks up the parameter by its name.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.models.utils import WeightsMapper

from onegraph.formats.fused import STACKS
from onegraph.formats.weight import Tensors, WeightFormat
from onegraph.integrations.vllm.shards import Shard, Slots
from onegraph.ops.activation import Gate, GeGLU, SwiGLU
from onegraph.ops.weight import weight_ops

GATES: dict[MoEActivation, Gate] = {MoEActivation.SILU: SwiGLU(), MoEActivation.GELU_TANH: GeGLU()}
MATRICES = dict(zip(STACKS, ("w13", "w2"), strict=True))  # of each stack the name that vLLM's parameters begin with
LAYER = "routed_experts"  # that of vLLM's layer within the module `experts`


def stack_mapper() -> WeightsMapper:
    """The tensors of stacks under the names of the parameters that they are loaded into."""
    return WeightsMapper(
        orig_to_new_regex={
            re.compile(rf"\bexperts\.{stack}\.(\w+)$"): rf"experts.{LAYER}.{matrix}_\1"
            for stack, matrix in MATRICES.items()
        }
    )


class Stack:
    """One matrix of all experts on this rank: parameters `w13_{tensor}` or `w2_{tensor}` of vLLM's layer, slots of a
    linear with the experts in front.

    Args:
        prefix: of the layer. name: of the stack within it. rows, k: outputs (gate and up by themselves) and inputs of
            an expert on this rank. experts: which ones of the checkpoint's `count` it holds, in order.

    Raises ValueError where the format does not hold such sizes.
    """

    def __init__(
        self, prefix: str, name: str, format: WeightFormat, rows: Sequence[int], k: int, *, share: Shard, count: int,
        experts: Sequence[int], dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.name, self.count, self.experts = name, count, experts
        self.whole = f"{prefix}.{name}"
        self.slots = Slots({self.whole: format}, rows, k, share, dtype)

    def parameter(self, suffix: str) -> str:
        return f"{MATRICES[self.name]}_{suffix}"

    def create(self, layer: Any) -> None:
        for suffix, (shape, kind) in self.slots.shapes.items():
            value = torch.empty((len(self.experts), *shape), dtype=kind)
            parameter: Any = nn.Parameter(value, requires_grad=False)
            parameter.weight_loader = self._loader(suffix)
            layer.register_parameter(self.parameter(suffix), parameter)

    def _loader(self, suffix: str) -> Callable[..., None]:
        """As vLLM knows loaders; its arguments' names count when weights are reloaded."""

        def weight_loader(param: Tensor, loaded_weight: Tensor) -> None:
            self.load(suffix, param, loaded_weight)

        return weight_loader

    def load(self, suffix: str, parameter: Tensor, tensor: Tensor) -> None:
        """Copies this rank's share of its experts. Raises ValueError, as `Slots.load` does, and for another number of
        experts."""
        if tensor.dim() == 0 or len(tensor) != self.count:
            found = len(tensor) if tensor.dim() else "no"
            raise ValueError(f"{self.whole}.{suffix} holds {found} experts; config.json says {self.count}")
        for at, expert in enumerate(self.experts):
            self.slots.load(suffix, parameter[at], tensor[expert])

    def finish(self, layer: Any, *, made_up: bool) -> None:
        """As `Slots.finish`, of each expert."""
        own = {suffix: getattr(layer, self.parameter(suffix)).data for suffix in self.slots.shapes}
        device = next(iter(own.values())).device
        random = torch.Generator(device).manual_seed(0) if made_up else None
        for at in range(len(self.experts)):
            self.slots.settle({suffix: tensor[at] for suffix, tensor in own.items()}, random)
        self.slots.loaded.clear()
        self.slots.sizes.clear()
        self.slots.add_constants(layer, device)

    def kernel_args(self, layer: Any) -> Tensors:
        """What the op takes; no copy."""
        found = {key: getattr(layer, key) for key in self.slots.constants}
        for key, slot in self.slots.taken[0].items():
            whole = getattr(layer, self.parameter(slot.suffix))
            found[key] = whole if slot.kept.rows else whole[:, slot.first]
        return found


class OnegraphExpertsMethod(FusedMoEMethodBase):
    """Routed experts whose two stacks are of `format`. Raises ValueError for what the op does not do, by the layer's
    name: other gates than `GATES`, biases, adapters, weights on inputs, data and sequence parallelism."""

    def __init__(self, moe: FusedMoEConfig, prefix: str, format: WeightFormat, *, weighted_inputs: bool) -> None:
        super().__init__(moe)
        run = weight_ops(format).experts
        parallel = moe.moe_parallel_config
        refused = {
            f"experts of {format}": run is None,
            f"the gate {moe.activation.value!r}": moe.activation not in GATES,
            "a bound of the gate": moe.swiglu_limit is not None,
            "biases": moe.has_bias,
            "adapters (LoRA)": moe.is_lora_enabled,
            "routing weights on inputs": weighted_inputs,
            "data parallelism": parallel.dp_size > 1 or parallel.pcp_size > 1 or parallel.is_sequence_parallel,
        }
        if found := [what for what, present in refused.items() if present]:
            raise ValueError(
                f"{prefix}: experts in codes do not run with {found[0]} in vLLM; serve the unquantized model there"
            )
        assert run is not None
        self.prefix, self.format, self._run, self._gate = prefix, format, run, GATES[moe.activation]
        self.stacks: tuple[Stack, ...] = ()
        self._dummy = False

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *_: Any, **__: Any
    ) -> tuple[int, int]:
        """As they are: rotations go over a dimension, padding it would make another layer."""
        return hidden_size, intermediate_size_per_partition

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Registers the stacks' parameters, and has the layer's tensors come to them."""
        parallel, placed = self.moe.moe_parallel_config, layer.expert_map_manager.expert_map
        experts = range(num_experts) if placed is None else torch.where(placed >= 0)[0].tolist()
        assert len(experts) == num_experts
        share = Shard(parallel.tp_rank, parallel.tp_size)
        wide = intermediate_size_per_partition
        sizes = ((wide, wide), hidden_size), ((hidden_size,), wide)
        self.stacks = tuple(
            Stack(
                self.prefix, name, self.format, rows, k, share=share, count=self.moe.num_experts, experts=experts,
                dtype=params_dtype,
            )
            for name, (rows, k) in zip(STACKS, sizes, strict=True)
        )  # fmt: skip
        for stack in self.stacks:
            stack.create(layer)
        layer.load_weights = self._load_weights(layer)
        self._dummy = get_current_vllm_config().load_config.load_format == "dummy"

    def _load_weights(self, layer: Any) -> Callable[[Iterable[tuple[str, Tensor]]], Iterator[str]]:
        """What stands in for the layer's own `load_weights`, which knows the names of single experts and of dense
        stacks. Takes a checkpoint's names, too, since not all loaders rename. Raises ValueError for a tensor that no
        stack has."""
        mapper = stack_mapper()

        def load_weights(weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
            for name, tensor in weights:
                parameter = mapper.map_name(f"experts.{name}").removeprefix("experts.").removeprefix(f"{LAYER}.")
                if (target := getattr(layer, parameter, None)) is None:
                    raise ValueError(
                        f"{self.prefix}.{name} is in the checkpoint; experts of {self.format} have no such tensor"
                    )
                target.weight_loader(target, tensor)
                yield parameter

        return load_weights

    def process_weights_after_loading(self, layer: Any) -> None:
        for stack in self.stacks:
            stack.finish(layer, made_up=self._dummy)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """vLLM's kernels are not asked."""

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """x [T, D], topk_weights, topk_ids [T, K] -> [T, D], the sum over this rank's part of the experts; shared ones
        are run by vLLM's runner."""
        ids, weights = topk_ids.int(), topk_weights.float()
        if (placed := layer.expert_map) is not None:  # another rank's: its expert runs nowhere here but by zero
            ids = placed[ids.long()]
            weights = torch.where(ids < 0, 0.0, weights)
        gate_up, down = (stack.kernel_args(layer) for stack in self.stacks)
        run = self.format, x.contiguous(), ids.contiguous(), weights.contiguous()
        out: Tensor = self._run(*run, gate_up, down, self._gate, None)
        return out
