"""The quantization "onegraph" as vLLM sees it: which layer is stored in which format, and so gets which method."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from onegraph.formats.dense import DENSE
from onegraph.formats.fused import STACKS, in_blocks
from onegraph.formats.quantization import parse_quantization
from onegraph.formats.weight import Quantization, WeightFormat
from onegraph.integrations.vllm import DRAFTS, FUSED, fuses, unsupported

HEAD, EMBED = "lm_head", "embed_tokens"
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
BLOCK = re.compile(r".*?\.\d+\.")  # the name of a block, with what goes before it
MODULE = re.compile(BLOCK.pattern + r"\w+\.")  # that of a module within it, such as attention
DRAFT = "draft_model."  # what vLLM puts before the names of a model that drafts for another


class _Unread:
    """The checkpoint's file, as far as vLLM has come when it asks for methods: a format that needs a look at it is not
    one whose `quantization_config` tells the layers' formats."""

    def __contains__(self, name: object) -> bool:
        raise ValueError(
            f"whether the checkpoint holds {name} decides a layer's format, and vLLM has not read it yet; it serves "
            "such checkpoints by itself: leave out --quantization"
        )

    def info(self, name: str) -> Any:
        return name in self  # raises


@register_quantization_config("onegraph")
class OnegraphConfig(QuantizationConfig):
    """`quantization_config` of a checkpoint, read by the same parser that our own engine uses."""

    def __init__(self, quantization: Quantization) -> None:
        super().__init__()
        self.quantization = quantization
        self.coded: frozenset[str] = frozenset()  # layers that the checkpoint holds in codes, by vLLM's names
        self.modules: frozenset[str] = frozenset()  # of blocks, with the block, in the checkpoint
        self.taken: set[str] = set()  # those that a method of ours runs

    def __repr__(self) -> str:
        return f"OnegraphConfig({self.quantization})"

    @classmethod
    def get_name(cls) -> str:
        return "onegraph"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # it stands in config.json

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "OnegraphConfig":
        """Raises ValueError on a vLLM that is too old, and on keys, versions and rates that we do not know."""
        if why := unsupported():
            raise ValueError(why)
        quantization = parse_quantization(config)
        assert quantization is not None
        return cls(quantization)

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Tells vLLM's model and loader where head and embedding are two, names our class of the model, and notes what
        the checkpoint holds in codes. Raises ValueError for gpt-oss's blocks beside linears in codes of ours: vLLM's
        loader would take them for numbers."""
        from vllm.transformers_utils.config import get_safetensors_params_metadata

        tensors = get_safetensors_params_metadata(model_name, revision=revision)
        if blocks := next(filter(None, map(in_blocks, tensors)), None):
            raise ValueError(
                f"{blocks}: experts in MXFP4 beside codes of onegraph do not run in vLLM; serve the published model"
            )
        self.coded = frozenset(layer for name in tensors if (layer := self._coded(name)) is not None)
        self.modules = frozenset(found[0] for name in tensors if (found := MODULE.match(name)))
        if hf_config is not None and self.unties:
            hf_config.get_text_config().tie_word_embeddings = hf_config.tie_word_embeddings = False
        names = getattr(hf_config, "architectures", None) or [""]
        if names[0] in FUSED and fuses():
            hf_config.architectures = [FUSED[names[0]]]

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.quantization = self.quantization.renamed(hf_to_vllm_mapper.apply_dict)
        self.coded = frozenset(hf_to_vllm_mapper.apply_list(sorted(self.coded)))
        self.modules = frozenset(hf_to_vllm_mapper.apply_list(sorted(self.modules)))

    def get_checkpoint_weight_mapper(self) -> Any:
        """What vLLM's loader renames tensors by, once the model is built and before it reads one. Raises ValueError, as
        `check_taken`: models that load by names of their own would raise a KeyError."""
        from onegraph.integrations.vllm.experts import stack_mapper

        self.check_taken()
        return stack_mapper()

    def _coded(self, tensor: str) -> str | None:
        """The layer whose codes the tensor of this name is; None where it is none."""
        layer = tensor.rpartition(".")[0]
        format = self.format_of(layer)
        return layer if format.coded and tensor == format.names((), layer)["codes"] else None

    def check_taken(self) -> None:
        """Once vLLM's model is built: raises ValueError that names a layer whose codes no method of ours was asked to
        run, though others of its block were: some models build a layer by themselves and pass over what they have no
        parameter for. Blocks of which nothing was asked for are another rank's, or a draft's."""
        built = {block[0] for name in self.taken if (block := BLOCK.match(name))}
        for name in sorted(self.coded - self.taken):
            if (block := BLOCK.match(name)) and block[0] in built:
                raise ValueError(
                    f"{name}: the checkpoint holds it in codes, and vLLM's model builds it without onegraph; run this "
                    "checkpoint in onegraph or transformers"
                )

    def format_of(self, layer: str) -> WeightFormat:
        return self.quantization.format_of(layer, _Unread())

    def stored_formats(self, parts: Sequence[str]) -> dict[str, WeightFormat]:
        """Those of the linears of one layer of vLLM's: dense where the checkpoint has codes of none of them, whatever
        rate the config has for linears at large: of routers, towers and what else a family keeps. Where no checkpoint
        is read (dummy weights), what the config says."""
        kept = self.coded and self.coded.isdisjoint(parts)
        return {name: DENSE if kept else self.format_of(name) for name in parts}

    @property
    def unties(self) -> bool:
        """Whether head and embedding are two, whatever the config says of ties: one of them is quantized."""
        return self.format_of(HEAD).coded or self.format_of(EMBED).coded

    def parts_of(self, prefix: str) -> list[str]:
        """The linears of the checkpoint that vLLM's layer `prefix` is made of: q, k and v of a qkv_proj, unless the
        model says otherwise, as Phi-3's does. Qwen3-MoE's is silent about its dense layers."""
        parent, _, name = prefix.removeprefix(DRAFT).rpartition(".")
        names = self.packed_modules_mapping.get(name) or PACKED.get(name, [name])
        return [self._stored_name(f"{parent}.{part}" if parent else part) for part in names]

    def _stored_name(self, layer: str) -> str:
        """The name that the checkpoint has for vLLM's `layer`, as vLLM maps it: a model may call a module of its blocks
        something else where it asks for methods than where it loads (MiniMax-M2's experts)."""
        module = MODULE.match(layer)
        if not self.modules or module is None or module[0] in self.modules:
            return layer
        block, rest = BLOCK.match(layer), layer[module.end() :]
        assert block is not None
        found = [name for name in self.modules if name.startswith(block[0]) and name + rest in self.coded]
        return found[0] + rest if len(found) == 1 else layer

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a layer; None leaves it to vLLM. Raises ValueError for one that does not run in codes."""
        from vllm.model_executor.layers.fused_moe import GateLinear
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        from onegraph.integrations.vllm.linear import OnegraphEmbeddingMethod, OnegraphLinearMethod, UntiedMethod

        self._name_draft()
        if isinstance(layer, VocabParallelEmbedding):
            head = isinstance(layer, ParallelLMHead)
            if head and BLOCK.match(prefix):
                return None  # a draft layer's copy, which is dense; vLLM puts the model's head in its place
            name = HEAD if head else EMBED
            if (format := self.format_of(name)).coded:
                return OnegraphEmbeddingMethod(prefix or name, format, head=head)
            return UntiedMethod() if self.unties else None
        if isinstance(layer, GateLinear):
            return UnquantizedLinearMethod()  # routers keep their file's dtype
        if isinstance(layer, LinearBase):
            parts = self.stored_formats(self.parts_of(prefix))
            if any(format.coded for format in parts.values()):
                self.taken.update(parts)
                return OnegraphLinearMethod(parts, self.check_taken)
            return UnquantizedLinearMethod()
        if isinstance(layer, RoutedExperts):
            return self._experts_method(layer, prefix)
        return None

    def _name_draft(self) -> None:
        """While the model is built, which vLLM does first: names our class of its draft layer, where the checkpoint has
        codes of that. The name of vLLM's own stays, by which it knows what the layer returns. Raises ValueError for a
        layer in codes of which we have no class."""
        drafts = getattr(get_current_vllm_config_or_none(), "speculative_config", None)
        if drafts is None or drafts.method != "mtp" or not fuses():
            return
        config: Any = drafts.draft_model_config.hf_config
        name, *_ = config.architectures
        if name not in DRAFTS:
            return
        behind = f"model.layers.{config.num_hidden_layers}."
        if coded := next((layer for layer in sorted(self.coded) if layer.startswith(behind)), None):
            if (ours := DRAFTS[name]) is None:
                raise ValueError(f"{coded}: vLLM's {name} runs no quantized draft layer; quantize without draft_layers")
            config.architectures = [ours, name]

    def _experts_method(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        """That of routed experts; None leaves dense ones to vLLM, in whatever form their family has them."""
        from onegraph.integrations.vllm.experts import OnegraphExpertsMethod

        prefix = prefix.removeprefix(DRAFT)
        formats = self.stored_formats([self._stored_name(f"{prefix}.{stack}") for stack in STACKS])
        if len(set(formats.values())) > 1:
            gate_up, down = formats
            raise ValueError(f"{gate_up} and {down} have two rates; experts of a layer must have one")
        format = next(iter(formats.values()))
        if not format.coded:
            return None
        self.taken.update(formats)
        weighted = layer.apply_router_weight_on_input
        return OnegraphExpertsMethod(layer.moe_config, prefix, format, weighted_inputs=weighted)
