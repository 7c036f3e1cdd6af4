"""Any causal language model of transformers without its weights: which modules it has, and how files name them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.files import CheckpointError, quote
from onegraph.integrations.hf.experts import HeldExperts, holds_experts
from onegraph.integrations.hf.kinds import plain_linear, size_of, why_left

LEFT_WHOLE = "another part of the model than its blocks"


def has(config: Mapping[str, Any]) -> bool:
    """Whether transformers has a causal language model for a config.json, without code from the checkpoint."""
    return config.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and config.get("model_type") in CONFIG_MAPPING


class Skeleton:
    """The modules of a model without its weights, and how a checkpoint names what is in them.

    Raises CheckpointError for a model that is quantized already, or whose blocks are not one list; what transformers
    says of a config that it cannot take comes as it is.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        if config.get("quantization_config") is not None:
            raise CheckpointError("config.json: the model is quantized already; give the unquantized model")
        kept = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
        settings = copy.deepcopy(kept)  # transformers writes into it: rope_theta into rope_scaling
        parsed = CONFIG_MAPPING[config["model_type"]].from_dict(settings)
        self.model: Any = _without_weights(parsed)
        self.path = _blocks_of(self.model)
        self.blocks: nn.ModuleList = self.model.get_submodule(self.path)
        self.parameters = {name: tuple(p.shape) for name, p in self.model.state_dict().items()}
        self._transforms = get_model_conversion_mapping(self.model)
        self._names = dict.fromkeys(self.parameters, True)

    @property
    def text(self) -> Any:
        """The config of the text decoder."""
        return self.model.config.get_text_config(decoder=True)

    def prefix(self, i: int) -> str:
        return f"{self.path}.{i}."

    def parameter_of(self, name: str) -> str | None:
        """The parameter that a tensor of a checkpoint is (a part of); None for one that the model does not read."""
        renamings = [entry for entry in self._transforms if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._transforms if isinstance(entry, WeightConverter)]
        found, _ = rename_source_key(name, renamings, converters, self.model.base_model_prefix, self._names)
        if found in self.parameters:
            return str(found)
        found, _ = rename_source_key(name, [], [], self.model.base_model_prefix, self._names)
        return str(found) if found in self.parameters else None

    def shapes(self, i: int) -> dict[str, tuple[int, ...]]:
        """Linears of block `i` [n, k] and its stacks of experts [E, n, k], by the name within it."""
        return self.sorted_out[i][0]

    @property
    def left(self) -> dict[str, str]:
        """Matrices that are not rounded, and why; embedding and head are options of their own."""
        found = {
            self.prefix(i) + name: why for i, (_, left) in enumerate(self.sorted_out) for name, why in left.items()
        }
        ends = {id(self.model.get_input_embeddings()), id(self.model.get_output_embeddings())}
        for name, module in self.model.named_modules():
            inside = f"{name}.".startswith(f"{self.path}.")
            if not inside and id(module) not in ends:
                found |= {
                    f"{name}.{key}": LEFT_WHOLE for key, p in module.named_parameters(recurse=False) if p.dim() > 1
                }
        return found

    @property
    def kept(self) -> frozenset[str]:
        """Of those in the blocks, the linears, which the config has to name."""
        return frozenset(
            name
            for i, (_, left) in enumerate(self.sorted_out)
            for local in left
            if plain_linear(_module(self.blocks[i], local)) is not None and (name := self.prefix(i) + local)
        )

    @cached_property
    def sorted_out(self) -> list[tuple[dict[str, tuple[int, ...]], dict[str, str]]]:
        """Of each block: what may be rounded, and the matrices that are left, with why."""
        return [_sorted_out(block) for block in self.blocks]

    def layer_of(self, name: str) -> str | None:
        """The linear or stack whose weight the tensor `name` of a checkpoint is, or is a part of."""
        found = self._layers.get(name, "")
        if found == "":
            parameter = self.parameter_of(name)
            found = None
            if parameter is not None and parameter.startswith(f"{self.path}."):
                number, _, local = parameter.removeprefix(f"{self.path}.").partition(".")
                shapes = self.shapes(int(number))
                local = local if local in shapes else local.removesuffix(".weight")
                found = self.prefix(int(number)) + local if local in shapes else None
            self._layers[name] = found
        return found

    @cached_property
    def _layers(self) -> dict[str, str | None]:
        return {}

    @cached_property
    def tied(self) -> bool:
        return bool(getattr(self.text, "tie_word_embeddings", False))

    @cached_property
    def spare(self) -> frozenset[str]:
        """Parameters that are another one's, which files leave out."""
        return frozenset(getattr(self.model, "all_tied_weights_keys", None) or ()) if self.tied else frozenset()

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises CheckpointError that names parameters which the checkpoint does not have."""
        found = {self.parameter_of(name) for name in checkpoint.names}
        own = dict(self.model.named_parameters(remove_duplicate=False))
        missing = [quote(name) for name in self.parameters if name not in found | self.spare and name in own]
        if missing:
            more = ", ..." if len(missing) > 5 else ""
            raise CheckpointError(
                f"{checkpoint.path}: tensors do not fit config.json: {len(missing)} missing: "
                f"{', '.join(missing[:5])}{more}"
            )


def outline_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The `onegraph.api.outline.Outline` of a checkpoint, as keywords."""
    skeleton = Skeleton(checkpoint.config)
    text = skeleton.text
    shapes = [skeleton.shapes(i) for i in range(len(skeleton.blocks))]
    widest = max((max(shape[-2:]) for names in shapes for shape in names.values()), default=1)
    return {
        "blocks": {skeleton.prefix(i): names for i, names in enumerate(shapes)},
        "layer_of": skeleton.layer_of,
        "hidden": text.hidden_size,
        "inner": widest,
        "vocab": text.vocab_size,
        "positions": int(getattr(text, "max_position_embeddings", None) or 1 << 20),
        "cached": 2 * sum(_width_of_keys(layer) for layer in _layers_of(text, len(shapes))),
        "weights": max(sum(p.numel() for p in block.parameters()) for block in skeleton.blocks),
        "left": skeleton.left,
        "kept": skeleton.kept,
        "check": skeleton.check,
    }


def _layers_of(text: Any, count: int) -> list[Any]:
    """The config of each layer: another one where layers differ in attributes (Gemma 4's head_dim)."""
    apart = getattr(text, "is_heterogeneous", False)
    return [text.per_layer_config[i] for i in range(count)] if apart else [text] * count


def _width_of_keys(config: Any) -> int:
    """Numbers of a token's keys in a layer's cache; 0 where no layer attends."""
    wide = getattr(config, "num_attention_heads", None)
    if not isinstance(wide, int):
        return 0
    dim: int = getattr(config, "head_dim", None) or config.hidden_size // wide
    return dim * int(getattr(config, "num_key_value_heads", None) or wide)


def expected_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of what a file has of the model of a config.json, by transformers' names."""
    skeleton = Skeleton(config)
    return {name: shape for name, shape in skeleton.parameters.items() if name not in skeleton.spare}


class _NoMemory(TorchFunctionMode):
    """Within it `torch.empty` makes tensors on the meta device: what classes make parameters of."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty and given.get("device") is None:
            given["device"] = "meta"
        return func(*args, **given)


def _without_weights(config: Any) -> Any:
    """The modules of a config with parameters on the meta device, and buffers, which files need not hold, as their code
    computes them."""
    with _NoMemory():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager").eval()
    unset = []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                module.register_parameter(name, nn.Parameter(parameter.to("meta")))
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
                unset.append(module)
    for module in unset:
        module._is_hf_initialized = False  # transformers' mark, by which it sets what was made by `torch.empty`
    model.initialize_weights()
    return model.requires_grad_(False)


def _module(block: nn.Module, name: str) -> nn.Module:
    """The module that `name` is, or that has it as a parameter."""
    try:
        return block.get_submodule(name)
    except AttributeError:
        return block.get_submodule(name.rpartition(".")[0])


def _blocks_of(model: Any) -> str:
    """The path of the list of decoder blocks: the one with as many entries as the config has layers."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    found = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    }
    if not found:
        raise CheckpointError(f"{model.config.model_type}: its {count} blocks are not one list of modules")
    return max(found, key=lambda name: (found[name], -len(name)))


def _sorted_out(block: nn.Module) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    shapes: dict[str, tuple[int, ...]] = {}
    left: dict[str, str] = {}
    experts = {name: module for name, module in block.named_modules() if holds_experts(module)}
    stacks: dict[str, tuple[int, ...]] = {}
    for name, module in block.named_modules():
        if name in experts:
            stacks |= HeldExperts(name, module).shapes
            continue
        why = why_left(name, module, experts)
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                if why is None:
                    shapes[name] = size_of(module)
                else:
                    left[f"{name}.{key}".removesuffix(".weight")] = why
    return shapes | stacks, left
