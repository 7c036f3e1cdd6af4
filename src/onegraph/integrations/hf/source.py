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
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.files import CheckpointError, quote
from onegraph.integrations.hf.experts import HeldExperts, holds_experts
from onegraph.integrations.hf.kinds import plain_linear
from onegraph.integrations.hf.skeleton import Skeleton


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

    num_drafts = 0  # transformers' modules leave draft layers out

    def draft_inputs(self, block: Any, tokens: Tensor, hidden: Tensor) -> Tensor:
        raise NotImplementedError("transformers' modules have no draft layer")

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
    def embed(self, tokens: Tensor, table: Tensor | None = None) -> Tensor:
        assert table is None  # both ends stay as they are
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
        block.number = i  # type: ignore[assignment]  # attributes are tensors and modules to mypy
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

    def head(self, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
        assert weight is None
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
        for wrapped in (self._tuple_size,) if self._tuple_size is not None else (0, 1, 2):
            stand_ins = [_StandIn(block, wrapped) for block in self._empty]
            stand_ins[-1].result = hidden
            setattr(owner, leaf, nn.ModuleList(stand_ins))
            try:
                logits = self._model(input_ids=tokens, use_cache=False).logits
                fits = all(later.given is earlier.returned for earlier, later in pairwise(stand_ins))
            except (IndexError, TypeError, AttributeError, RuntimeError, ValueError):
                if wrapped == 2:
                    raise
                fits = False
            finally:
                setattr(owner, leaf, self.skeleton.blocks)
            if fits:
                self._tuple_size = wrapped
                first = stand_ins[0].given
                assert first is not None
                return first, logits, [(each.args, each.kwargs) for each in stand_ins]
        raise ValueError(
            f"{self.config.get('model_type')}: a block is not given what the one before it returns; this model cannot "
            "be quantized block by block"
        )

    _tuple_size: int | None = None  # of what a block returns, the stream first; 0: the stream alone

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


class _StandIn(nn.Module):
    """In the place of a block: keeps what it is given, and returns it; `wrapped`: at the head of a tuple of so many."""

    def __init__(self, block: nn.Module, wrapped: int) -> None:
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
        return (self.returned, *[None] * (self.wrapped - 1)) if self.wrapped else self.returned


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
def _quiet() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
