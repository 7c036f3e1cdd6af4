"""Any causal language model of transformers as the quantizer calibrates on it, block by block.

The model is made without its weights. Around the blocks transformers' own forward runs, with stand-ins in their places:
what the first is given is the embedded text, what each is given besides (rotations, masks) depends on shapes alone, and
what the last returns goes through norm and head. A block's weights are read from their shards when it is its turn,
under the renamings and joins that `from_pretrained` makes, and are dropped behind it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.files import CheckpointError, quote
from onegraph.integrations.hf.experts import HeldExperts, holds_experts, stack_names
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
        with _without_weights():
            self.model: Any = AutoModelForCausalLM.from_config(
                parsed, dtype=torch.float32, experts_implementation="eager"
            ).eval()
        self.model.requires_grad_(False)
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

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises CheckpointError that names parameters which the checkpoint does not have."""
        found = {self.parameter_of(name) for name in checkpoint.names}
        spare = set(getattr(self.model, "all_tied_weights_keys", {}) or {}) if self.tied else set()
        own = dict(self.model.named_parameters(remove_duplicate=False))
        missing = [quote(name) for name in self.parameters if name not in found | spare and name in own]
        if missing:
            more = ", ..." if len(missing) > 5 else ""
            raise CheckpointError(
                f"{checkpoint.path}: tensors do not fit config.json: {len(missing)} missing: "
                f"{', '.join(missing[:5])}{more}"
            )


class ModulesSource:
    """What `onegraph.quant` asks of a model (`QuantizableModel`), over transformers' modules in float32.

    Raises ValueError where a block's arguments depend on the text, which running block by block does not give it.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device | str = "cpu") -> None:
        self.config, self.device, self.checkpoint = checkpoint.config, torch.device(device), checkpoint
        self.skeleton = Skeleton(checkpoint.config)
        self.skeleton.check(checkpoint)
        self._model = self.skeleton.model
        self._forms: dict[tuple[int, int], list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
        self._groups: dict[int, list[list[str]]] = {}
        self._outside = [name for name in checkpoint.names if self._number(name) is None]
        self._empty = [copy.deepcopy(block) for block in self.skeleton.blocks]
        self._load(self._outside)
        for name, module in self._model.named_modules():
            if not f"{name}.".startswith(f"{self.skeleton.path}."):
                _place(module, self.device)

    # ------------------------------------------------------------------------------------------------ what is asked for

    @property
    def num_blocks(self) -> int:
        return len(self._empty)

    def shapes(self, i: int) -> dict[str, tuple[int, ...]]:
        return self.skeleton.shapes(i)

    @property
    def kept(self) -> frozenset[str]:
        return self.skeleton.kept

    def block_prefix(self, i: int) -> str:
        return self.skeleton.prefix(i)

    def layer_of(self, name: str) -> str | None:
        return self.skeleton.layer_of(name)

    def end_name(self, name: str) -> str:
        """The checkpoint's tensor for "lm_head.weight" or "model.embed_tokens.weight"."""
        embedding = "model.embed_tokens.weight"
        found = {self.skeleton.parameter_of(each): each for each in self._outside}
        return found.get(name) or found[embedding]

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        given: Tensor = self._around(tokens.to(self.device))[0]
        return given

    def load_block(self, i: int) -> nn.Module:
        """Block `i`, read from disk now."""
        blocks = self.skeleton.blocks
        self.checkpoint.forget()
        self._load([name for name in self.checkpoint.names if self._number(name) == i])
        block = blocks[i]
        blocks[i] = copy.deepcopy(self._empty[i])
        for name, module in list(block.named_modules()):
            if (linear := plain_linear(module)) is not None and linear is not module:
                block.set_submodule(name, linear)
        block = block.to(self.device).requires_grad_(False)
        block.number = i  # type: ignore[assignment]
        if i not in self._groups:
            self._groups[i] = self._shared_inputs(block, i)
        return block

    def run_block(self, block: Any, hidden: Tensor) -> Tensor:
        args, kwargs = self._form((hidden.shape[0], hidden.shape[1]))[block.number]
        found = block(hidden, *args, **kwargs)
        result: Tensor = found[0] if isinstance(found, tuple) else found
        return result

    def linear_groups(self, block: Any) -> list[list[tuple[str, Any]]]:
        return [[(name, block.get_submodule(name)) for name in group] for group in self._groups[block.number]]

    def expert_layers(self, block: Any) -> list[HeldExperts]:
        return [HeldExperts(name, module) for name, module in block.named_modules() if holds_experts(module)]

    def final_norm(self, hidden: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handle = self._model.get_output_embeddings().register_forward_pre_hook(lambda m, args: seen.append(args[0]))
        try:
            self._around(self._blank(hidden), hidden)
        finally:
            handle.remove()
        return seen[0]

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._around(self._blank(hidden), hidden)[1]
        return logits.float()

    # ---------------------------------------------------------------------------------------------------------- within

    def _number(self, name: str) -> int | None:
        """The block that a tensor of the checkpoint belongs to."""
        parameter, path = self.skeleton.parameter_of(name), self.skeleton.path
        if parameter is None or not parameter.startswith(f"{path}."):
            return None
        return int(parameter.removeprefix(f"{path}.").partition(".")[0])

    def _load(self, names: list[str]) -> None:
        tensors = {name: self.checkpoint.tensor(name) for name in names if self.skeleton.parameter_of(name) is not None}
        settings = LoadStateDictConfig(
            dtype=torch.float32,
            device_map={"": "cpu"},
            weight_mapping=get_model_conversion_mapping(self._model),  # type: ignore[arg-type]  # lists are invariant
        )
        with _quiet():
            info, _ = convert_and_load_state_dict_in_model(self._model, tensors, settings)
        if info.conversion_errors or info.mismatched_keys:
            what = [*info.conversion_errors, *(str(key) for key in info.mismatched_keys)][0]
            raise CheckpointError(f"{self.checkpoint.path}: {quote(what)} does not fit config.json")
        if self.skeleton.tied:
            self._model.tie_weights()

    def _blank(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape[:2], dtype=torch.int64, device=self.device)

    def _form(self, shape: tuple[int, int]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """What each block is given beside the residual stream, for rows and tokens of this shape."""
        if shape not in self._forms:
            texts = (torch.zeros(shape, dtype=torch.int64), torch.ones(shape, dtype=torch.int64))
            with torch.no_grad():
                found = [self._around(tokens.to(self.device))[2] for tokens in texts]
            if not _same(found[0], found[1]):
                raise ValueError(
                    f"{self.config.get('model_type')}: blocks are given more of the text than the residual stream, "
                    "which calibrating block by block does not have; this model cannot be quantized here"
                )
            self._forms[shape] = found[0]
        return self._forms[shape]

    def _around(self, tokens: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor, list[Any]]:
        """The model without its blocks: what the first of them is given, the logits, and what each is given besides.
        `hidden` is what the last one returns; None: whatever."""
        parent, _, leaf = self.skeleton.path.rpartition(".")
        owner = self._model.get_submodule(parent)
        for wrapped in (self._returns_tuple,) if self._returns_tuple is not None else (False, True):
            stand_ins = [_StandIn(block, wrapped) for block in self._empty]
            stand_ins[-1].result = hidden
            setattr(owner, leaf, nn.ModuleList(stand_ins))
            try:
                logits = self._model(input_ids=tokens, use_cache=False).logits
                fits = all(later.given is earlier.returned for earlier, later in pairwise(stand_ins))
            except (IndexError, TypeError, AttributeError, RuntimeError, ValueError):
                if wrapped:
                    raise
                fits = False
            finally:
                setattr(owner, leaf, self.skeleton.blocks)
            if fits:
                self._returns_tuple = wrapped
                first = stand_ins[0].given
                assert first is not None
                return first, logits, [(each.args, each.kwargs) for each in stand_ins]
        raise ValueError(
            f"{self.config.get('model_type')}: a block is not given what the one before it returns; this model cannot "
            "be quantized block by block"
        )

    _returns_tuple: bool | None = None

    def _shared_inputs(self, block: Any, i: int) -> list[list[str]]:
        """Linears of a block that read the same tensor, in the order in which they run. Those that do not run on a few
        tokens come last, each for itself."""
        names = [name for name, shape in self.shapes(i).items() if len(shape) == 2]
        order: list[tuple[str, Tensor]] = []
        handles = [
            block.get_submodule(name).register_forward_pre_hook(
                lambda module, args, name=name: order.append((name, args[0]))
            )
            for name in names
        ]
        source = torch.Generator().manual_seed(0)
        width = self.embed(torch.zeros(1, 8, dtype=torch.int64)).shape[-1]
        try:
            with torch.no_grad():
                self.run_block(block, torch.randn(1, 8, width, generator=source).to(self.device))
        finally:
            for handle in handles:
                handle.remove()
        groups: dict[int, list[str]] = {}
        for name, given in order:
            if not any(name in group for group in groups.values()):
                groups.setdefault(id(given), []).append(name)
        seen = {name for group in groups.values() for name in group}
        return [*groups.values(), *([name] for name in names if name not in seen)]


def outline_of(checkpoint: Checkpoint) -> Any:
    """The `onegraph.api.outline.Outline` of a checkpoint, as keywords."""
    skeleton = Skeleton(checkpoint.config)
    text = skeleton.text
    shapes = [skeleton.shapes(i) for i in range(len(skeleton.blocks))]
    widest = max((max(shape[-2:]) for names in shapes for shape in names.values()), default=1)
    wide = text.num_attention_heads
    heads, dim = getattr(text, "num_key_value_heads", None) or wide, getattr(text, "head_dim", None)
    return {
        "blocks": {skeleton.prefix(i): names for i, names in enumerate(shapes)},
        "layer_of": skeleton.layer_of,
        "hidden": text.hidden_size,
        "inner": widest,
        "vocab": text.vocab_size,
        "positions": int(getattr(text, "max_position_embeddings", None) or 1 << 20),
        "cached": 2 * len(shapes) * heads * (dim or text.hidden_size // wide),
        "weights": max(sum(p.numel() for p in block.parameters()) for block in skeleton.blocks),
        "left": skeleton.left,
        "kept": skeleton.kept,
        "check": skeleton.check,
    }


def expected_tensors(config: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], None]]:
    """Parameters of the model of a config.json, by transformers' names."""
    skeleton = Skeleton(config)
    return {name: (shape, None) for name, shape in skeleton.parameters.items()}


class _StandIn(nn.Module):
    """In the place of a block: keeps what it is given, and returns it."""

    def __init__(self, block: nn.Module, wrapped: bool) -> None:
        super().__init__()
        for name in ("attention_type", "layer_type", "layer_idx", "is_sliding", "sliding_window", "block_type"):
            if hasattr(block, name):  # what models look at to choose a mask
                setattr(self, name, getattr(block, name))
        self.wrapped = wrapped
        self.given: Tensor | None = None
        self.returned: Tensor | None = None
        self.result: Tensor | None = None
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.given, self.args, self.kwargs = hidden_states, args, kwargs
        self.returned = hidden_states if self.result is None else self.result
        return (self.returned,) if self.wrapped else self.returned


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


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(two, Tensor) and one.shape == two.shape and torch.equal(one, two)
    if isinstance(one, Mapping):
        return isinstance(two, Mapping) and all(_same(one[key], two.get(key)) for key in one)
    if isinstance(one, list | tuple):
        return isinstance(two, list | tuple) and all(_same(a, b) for a, b in zip(one, two, strict=False))
    return True


def _place(module: nn.Module, device: torch.device) -> None:
    """Own parameters and buffers of a module, its children's not, to the device."""
    for name, parameter in module.named_parameters(recurse=False):
        if not parameter.is_meta:
            module.register_parameter(name, nn.Parameter(parameter.to(device), requires_grad=False))
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = buffer.to(device)


@contextmanager
def _without_weights() -> Iterator[None]:
    """Modules made within have parameters on the meta device and buffers, which their code computes, where they are."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=False))

    nn.Module.register_parameter = on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def _quiet() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


__all__ = ["ModulesSource", "Skeleton", "expected_tensors", "has", "outline_of", "stack_names"]
