"""Models whose routed experts do not fit the GPU: how many of each layer it holds, and where the others lie."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onegraph.formats.weight import Tensors, WeightFormat
from onegraph.models.memory import GB, system_memory
from onegraph.nn.expert_cache import CachedExperts, sized
from onegraph.nn.experts import Experts
from onegraph.ops.calls import MAX_EXPERTS

if TYPE_CHECKING:
    from onegraph.models.config import LlamaConfig
    from onegraph.models.loader import Loader

ALIGNMENT = 256  # bytes, of a tensor within the memory of a layer
HOST = torch.device("cpu")


class ExpertMemory:
    """Experts of a model in host memory, `slots` of each layer on the device, and one stack that all layers share.

    Args:
        size: bytes on the device, at most. Raises ValueError where the model has no routed experts, or `size` holds
            fewer experts of a layer than a token uses, or the host has no memory for all of them.

    Attributes:
        slots: of each layer, experts on the device. fits: all of them fit, and nothing stays in host memory.
        host_bytes, device_bytes: what the experts take in host memory, and on the device.
    """

    def __init__(self, loader: Loader, config: LlamaConfig, size: int, device: torch.device) -> None:
        got, routed = f"expert_memory: got {size / GB:g} GB", config.routed
        if routed is None:
            raise ValueError(f"{got}; {config.model_type} has no routed experts: leave it out")
        if routed.count > MAX_EXPERTS:
            raise ValueError(
                f"{got}; layers have {routed.count} experts and a cache at most {MAX_EXPERTS}: leave it out"
            )
        self.device, self._shared = device, dict[object, Experts]()
        layers, formats = defaultdict[int, int](int), dict[int, WeightFormat]()
        prefixes = {config.prefix(i): i for i in range(config.layers)}
        for name, nbytes in loader.expert_bytes.items():
            at = next(i for prefix, i in prefixes.items() if name.startswith(prefix))
            layers[at] += nbytes
            formats[at] = loader.stack(name)[0] if name in loader.parts.stacks else loader.format_of(name)
        self.host_bytes = sum(layers.values())
        shared = sum(nbytes for nbytes, _ in {(layers[i], formats[i]) for i in layers})
        slot = self.host_bytes // routed.count  # an expert of each layer
        self.slots = min((size - shared) // slot, routed.count)
        self.fits = size >= self.host_bytes
        self.device_bytes = self.host_bytes if self.fits else shared + self.slots * slot
        if self.fits:
            return
        if self.slots < routed.top_k:
            least = math.ceil((shared + routed.top_k * slot) / 1e7) / 100
            raise ValueError(
                f"{got}; a token uses {routed.top_k} experts of each layer, and all layers share room for one layer's: "
                f"allowed is {least:g} GB and more; {self.host_bytes / GB:.2f} GB hold all experts"
            )
        free = system_memory() if device.type == "cuda" else None
        if free is not None and self.host_bytes > free:
            raise ValueError(
                f"{got}; the experts take {self.host_bytes / GB:.2f} GB of host memory, and {free / GB:.2f} GB are "
                "free there: free some, or quantize to fewer bits"
            )

    def empty(self, count: int, one: Tensors) -> Tensors:
        """Host tensors [count, ...] like those of `one`; for a GPU in one pinned piece. Raises ValueError where that
        cannot be, or the GPU cannot have the kernel that reads it."""
        if self.device.type != "cuda":
            return {key: tensor.new_empty((count, *tensor.shape)) for key, tensor in one.items()}
        from onegraph.ops.cuda.expert_cache import KERNEL
        from onegraph.ops.cuda.host_memory import pinned

        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        if why := KERNEL.unavailable_reason(index):
            raise ValueError(f"expert_memory: the kernel that copies experts cannot be had: {why}")
        sizes = {key: count * tensor.nbytes for key, tensor in one.items()}
        memory = pinned(sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes.values()), self.device)
        found, start = Tensors(), 0
        for key, tensor in one.items():
            found[key] = memory[start : start + sizes[key]].view(tensor.dtype).view(count, *tensor.shape)
            start += -(-sizes[key] // ALIGNMENT) * ALIGNMENT
        return found

    def cached(self, host: Experts) -> CachedExperts:
        """A layer's experts, whose weights `empty` has made."""
        if host.biases is not None:
            host.gate_up_bias, host.down_bias = (self._like(bias) for bias in host.biases)
        key = host.gate_up.format, host.gate_up.out_features, host.gate_up.in_features
        if key not in self._shared:
            self._shared[key] = sized(host, host.count, self.device)
        return CachedExperts(host, self.slots, self._shared[key])

    def _like(self, tensor: Tensor) -> Tensor:
        """A copy that the device can read."""
        made = self.empty(len(tensor), {"": tensor[0]})[""]
        return made.copy_(tensor)
