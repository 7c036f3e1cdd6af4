"""How transformers loads an onegraph checkpoint: its quantization config, and the quantizer that swaps layers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.quantizers import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from onegraph.formats.files import CheckpointError, quote
from onegraph.formats.fused import expected_stack
from onegraph.formats.fused import stack_names as stored_names
from onegraph.formats.quantization import parse_quantization
from onegraph.formats.table import TensorInfo, read_header
from onegraph.formats.weight import Expected, Quantization
from onegraph.integrations.hf.experts import IMPLEMENTATION, CodedStack, holds_experts, stack_names, swiglu_of
from onegraph.integrations.hf.kinds import plain_linear, size_of
from onegraph.integrations.hf.modules import CodedEmbedding, CodedLinear
from onegraph.integrations.hf.saving import LOADED, Originals
from onegraph.models.families import FAMILIES
from onegraph.models.wrapper import is_other

METHOD = "onegraph"


class OnegraphConfig(QuantizationConfigMixin):
    """`quantization_config` of config.json as transformers holds it; saved exactly as it was read.

    Raises ValueError for a key, version or rate that this onegraph does not know.
    """

    def __init__(self, **fields: Any) -> None:
        self.quant_method: Any = METHOD
        parsed = parse_quantization(fields)
        assert parsed is not None
        self.quantization: Quantization = parsed

    def to_dict(self) -> dict[str, Any]:
        return self.quantization.to_dict()


class OnegraphQuantizer(HfQuantizer):
    """Loads checkpoints that `onegraph quantize` wrote. It quantizes nothing itself."""

    requires_calibration = True  # transformers' word for: only models that are quantized already
    quantization_config: OnegraphConfig
    _originals: Originals
    _stacks = False  # whether the model has experts in codes

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        places = {str(place) for place in device_map.values()} if isinstance(device_map, dict) else {str(device_map)}
        if "disk" in places or ("cpu" in places and len(places) > 1):
            raise ValueError(
                f"device_map puts parts of the model on {', '.join(sorted(places))}; onegraph's layers stay where they "
                "run: give GPUs only, or the CPU only"
            )

    def _process_model_before_weight_loading(
        self,
        model: Any,
        dtype: torch.dtype | None = None,
        checkpoint_files: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        files = [Path(file) for file in checkpoint_files or ()]
        if not files or any(file.suffix != ".safetensors" for file in files):
            raise CheckpointError(f"{model.config.name_or_path}: a checkpoint of onegraph is model.safetensors files")
        found = {name: info for file in files for name, info in read_header(file).items()}
        renamed, drafts = _renaming(model), _draft_root(model)
        found = {name: info for name, info in found.items() if not name.startswith(drafts)}
        tensors = _Headers({renamed(name): info for name, info in found.items()})
        inner = _inner(model)
        self._originals = Originals({renamed(n).removeprefix(inner): (n, info) for n, info in found.items()})
        quantization = self.quantization_config.quantization.renamed(
            lambda layers: {renamed(name): rate for name, rate in layers.items() if not name.startswith(drafts)}
        )
        quantization.check_layers(_swap_layers(model, quantization, tensors, dtype or torch.get_default_dtype()))

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for module in model.modules():
            if isinstance(module, CodedLinear | CodedEmbedding | CodedStack):
                module.prepare()
            if any(isinstance(child, CodedStack) for child in module.children()):
                module._onegraph_gate = swiglu_of(module)
        setattr(model, LOADED, True)
        self._stacks = any(isinstance(module, CodedStack) for module in model.modules())
        return model

    def dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Plain layers in the model's present dtype; with `dtype` that one, and all other parameters in it too.

        transformers itself takes config.json's where none is given, in which the rest of the model need not be.
        """
        if dtype is not None:
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)
        return super().dequantize(model, dtype=model.dtype if dtype is None else dtype)

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        for name, module in list(model.named_modules()):
            if isinstance(module, CodedLinear | CodedEmbedding):
                model.set_submodule(name, module.plain(dtype or module.dtype))
            elif isinstance(module, CodedStack):
                above, _, leaf = name.rpartition(".")
                owner = model.get_submodule(above)
                delattr(owner, leaf)
                owner.register_parameter(leaf, module.plain(dtype or module.dtype))
        return model

    def is_serializable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """What `save_pretrained` writes: each tensor as the files have it that the model was loaded from."""
        return self._originals.restored(model.state_dict()), {}

    @property
    def is_trainable(self) -> bool:
        """Whether adapters may be trained; codes of routed experts pass no gradient on."""
        return not self._stacks

    @property
    def is_compileable(self) -> bool:
        return True


def _renaming(model: Any) -> Callable[[str], str]:
    """From a checkpoint's names to those of the model's modules, which are others in some families."""
    renamings = [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)]
    return lambda name: str(rename_source_key(name, renamings, [])[0])


def _inner(model: Any) -> str:
    """The prefix that names in a checkpoint have and this model's modules do not: AutoModel without a head drops it."""
    bare = model.get_output_embeddings() is None and not hasattr(model, model.base_model_prefix)
    return f"{model.base_model_prefix}." if bare else ""


def _draft_root(model: Any) -> tuple[str, ...]:
    """What names of the draft layer begin with, which transformers leaves out."""
    text = model.config.get_text_config(decoder=True)
    family = FAMILIES.get(str(text.model_type))
    draft = None if family is None else family.draft
    return () if draft is None else (draft.root.format(text.num_hidden_layers),)


class _Headers(dict[str, TensorInfo]):
    """What the checkpoint's files say of their tensors, as formats ask for it."""

    def info(self, name: str) -> TensorInfo:
        return self[name]


def _swap_layers(model: Any, config: Quantization, tensors: _Headers, dtype: torch.dtype) -> set[str]:
    """Puts our layers where the config asks for them, after holding every tensor of theirs against the file.

    Returns the names of all linears. Raises CheckpointError that names a tensor missing or wrong.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    inner = _inner(model)
    seen: set[str] = set()
    taken: set[str] = set()
    ends_coded = False
    kind: type[CodedLinear | CodedEmbedding]
    for name, module in list(model.named_modules()):
        full = inner + name
        if module is embedding:
            (n, k), kind, layer = (module.num_embeddings, module.embedding_dim), CodedEmbedding, "embed_tokens"
        elif holds_experts(module):
            seen |= (stacks := _swap_experts(module, full, config, tensors, dtype))
            taken |= stacks
            continue
        elif plain_linear(module) is not None:
            (n, k), kind = size_of(module), CodedLinear
            layer = "lm_head" if module is head else full
            seen.add(full)
        else:
            continue
        if not (format := config.format_of(layer, tensors)).coded:
            continue
        if layer == full and f"{full}.codes" not in tensors and (f"{full}.weight" in tensors or is_other(full)):
            continue  # no linear to our decoder, so the config has no rate for it: the gate of a shared expert, a tower
        ends_coded |= module is embedding or module is head
        wanted = format.expected(tensors, full, n, k, getattr(module, "bias", None) is not None)
        _check(wanted, tensors)
        stored = {name.removeprefix(f"{full}."): (shape, tensors[name].dtype) for name, (shape, _) in wanted.items()}
        names = {key: name.removeprefix(f"{full}.") for key, name in format.names(tensors, full).items()}
        with torch.device("meta"):
            more = {"factor": float(getattr(module, "scalar_embed_scale", 1.0))} if module is embedding else {}
            model.set_submodule(name, kind(format, n, k, names, stored, dtype, **more))
        taken.add(full)
    own = tuple(f"{inner}{child}." for child, _ in model.named_children())
    for name in tensors:
        if name.endswith(".codes") and name.startswith(own) and name.removesuffix(".codes") not in taken:
            # transformers would only warn, and run on random numbers in their place
            raise CheckpointError(f"tensor {quote(name)} is codes of a layer that this model does not have as a linear")
    if ends_coded and model.config.tie_word_embeddings:
        # Quantizing the head or the embedding unties them: the checkpoint then holds both.
        model.config.tie_word_embeddings = False
        model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    return seen


def _swap_experts(module: Any, full: str, config: Quantization, tensors: _Headers, dtype: torch.dtype) -> set[str]:
    """Puts stacks in codes where a layer of experts has parameters; the names of both stacks."""
    names = [f"{full}.{name}" for name in stack_names(module)]
    for which, (name, leaf) in enumerate(zip(names, stack_names(module), strict=True)):
        if f"{name}_blocks" in tensors:
            raise CheckpointError(
                f"{quote(name)} is kept in MXFP4 blocks, which transformers does not read beside codes; run it in "
                "onegraph, or quantize with --experts BITS"
            )
        if not config.stacked(name):
            continue
        held = getattr(module, leaf)
        count, n, k = (held.transpose(1, 2) if module.is_transposed else held).shape
        wanted = expected_stack(tensors, name, count, n, k, bias=False, quantization=config)
        _check(wanted, tensors)
        format, stored = stored_names(tensors, name, config)
        suffixes = {key: each.removeprefix(f"{name}.") for key, each in stored.items()}
        found = {each.removeprefix(f"{name}."): (shape, tensors[each].dtype) for each, (shape, _) in wanted.items()}
        delattr(module, leaf)
        with torch.device("meta"):
            setattr(module, leaf, CodedStack(format, n, k, suffixes, found, dtype, module, which))
        module.config._experts_implementation = IMPLEMENTATION
    return set(names)


def _check(wanted: Expected, tensors: _Headers) -> None:
    for name, (shape, dtypes) in wanted.items():
        if name not in tensors:
            raise CheckpointError(f"the checkpoint has no tensor {quote(name)}, which its quantization_config asks for")
        found = tensors[name]
        if found.shape != shape or found.dtype not in dtypes:
            kinds = " or ".join(str(kind).removeprefix("torch.") for kind in dtypes)
            raise CheckpointError(
                f"{found.file}: tensor {quote(name)} is {found.dtype} {list(found.shape)}; "
                f"the model asks for {kinds} {list(shape)}"
            )
