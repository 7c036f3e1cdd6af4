"""The text model of a multimodal checkpoint: its config, the names of its tensors, and the checkpoint without the rest.

config.json has the text model's own config in `text_config`, or, in older releases of Qwen-VL, among its own keys.
Files have its tensors under a prefix, as transformers wrote them before version 5 and since. Towers of other modalities
are not read; `quantize` copies them, so that what it writes is a whole multimodal model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.families import FAMILIES
from onegraph.models.fields import INERT, NEUTRAL, short, unused


class Wrapper(NamedTuple):
    """A multimodal model_type.

    Args:
        text: the model_type of its text model, or those that are allowed; the first where text_config gives none.
        tied: transformers' class default of tie_word_embeddings.
        flat: older files give the text model's keys beside the others'.
    """

    text: tuple[str, ...]
    tied: bool = False
    flat: bool = False


# What text_config may leave out. A model_type that is not listed works where its text_config gives a model_type.
WRAPPERS = {
    "gemma3": Wrapper(("gemma3_text",), tied=True),
    "gemma4": Wrapper(("gemma4_text",), tied=True),
    "mistral3": Wrapper(("mistral", "ministral3", "mistral4"), tied=True),
    "qwen2_vl": Wrapper(("qwen2_vl_text",), flat=True),
    "qwen2_5_vl": Wrapper(("qwen2_5_vl_text",), flat=True),
    "qwen3_vl": Wrapper(("qwen3_vl_text",)),
    "qwen3_vl_moe": Wrapper(("qwen3_vl_moe_text",)),
    "qwen3_5": Wrapper(("qwen3_5_text",)),
    "qwen3_5_moe": Wrapper(("qwen3_5_moe_text",)),
    "kimi_k25": Wrapper(("deepseek_v3", "kimi_k2"), tied=True),
}
# Models whose text is not computed as their text model alone would.
REFUSED = {"paligemma": "its prompt attends in both directions", "deepseek_v41": ""}
_HANDLED = ("text_config", "model_type", "quantization_config", "compression_config", "eos_token_id", "ignore_index")
_OF_OTHERS = re.compile(
    r"vision|visual|image|video|audio|speech|projector|projection|multimodal|multi_modal|mm_|spatial|merge|patch|qformer"
    r"|downsample|^(adaptor|scale_factor|window_size)$|_token_(id|index|ids)$"
)
_BODIES = "language_model.model.", "model.language_model.", "model.text_model."
_PREFIX = re.compile("|".join(f"^{re.escape(body)}" for body in _BODIES))
_HEAD = "language_model.lm_head."
DRAFT = "mtp."  # what names of a layer that predicts further tokens begin with, beside the text model
_OTHER = re.compile(
    r"^(?:model\.)?(?:mtp|mlp1|\w*(?:vision|visual|image|audio|speech|projector|connector|merger|resampler)\w*)(?:\.|$)"
)


def is_wrapper(config: Mapping[str, Any]) -> bool:
    """Whether config.json is of a multimodal model with a text model inside."""
    kind = str(config.get("model_type"))
    return kind not in REFUSED and (kind in WRAPPERS or isinstance(config.get("text_config"), Mapping))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's config; `config` itself where it is no wrapper's.

    Raises ValueError for a key beside text_config that may change what the text model computes, and where the two
    disagree.
    """
    if not isinstance(config, Mapping) or not is_wrapper(config):
        if isinstance(config, Mapping) and REFUSED.get(str(config.get("model_type"))):
            kind = config["model_type"]
            raise ValueError(f"model_type {short(kind)} is not supported: {REFUSED[kind]}")
        return config
    family = str(config["model_type"])
    wrapper, text = WRAPPERS.get(family, Wrapper(())), config.get("text_config")
    if text is None and wrapper.flat:
        return _flat(config, wrapper)
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config is {short(text)}; {family} must have its text model's config there")
    kind = text.get("model_type") or next(iter(wrapper.text), None)
    if kind is None or (wrapper.text and kind not in wrapper.text):
        allowed = " or ".join(wrapper.text) or "the text model's"
        raise ValueError(f"text_config.model_type is {short(text.get('model_type'))}; of {family} it is {allowed}")
    _check_beside(family, config, text)
    found = {**text, "model_type": kind, "tie_word_embeddings": _tied(config, text, wrapper)}
    if (ends := config.get("eos_token_id")) is not None:
        found["eos_token_id"] = ends
    if (quantization := _quantization(config, text)) is not None:
        found["quantization_config"] = quantization
    return found


def _flat(config: Mapping[str, Any], wrapper: Wrapper) -> dict[str, Any]:
    found = {key: value for key, value in config.items() if key == "eos_token_id" or not _OF_OTHERS.search(key)}
    return found | {"model_type": wrapper.text[0]}


def _tied(config: Mapping[str, Any], text: Mapping[str, Any], wrapper: Wrapper) -> bool:
    """transformers ties where either of the two says so; `Loader.own_head` unties where the file's head is another."""
    said = [part.get("tie_word_embeddings") for part in (config, text)]
    given = [value for value in said if value is not None]
    for value in given:
        if not isinstance(value, bool):
            raise ValueError(f"tie_word_embeddings is {short(value)}; it must be true or false")
    return any(given) if given else wrapper.tied


def _quantization(config: Mapping[str, Any], text: Mapping[str, Any]) -> object:
    above, inside = config.get("quantization_config"), text.get("quantization_config")
    if above is not None and inside is not None and above != inside:
        raise ValueError("quantization_config and text_config.quantization_config differ; give one of them")
    return inside if above is None else above


def _check_beside(family: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    """Raises ValueError for a key beside text_config that nobody reads, unless it is of another modality, cannot matter
    or repeats the text model's."""
    for key, value in config.items():
        known = key in _HANDLED or key in INERT or key == "tie_word_embeddings" or _OF_OTHERS.search(key)
        if known or unused(value, NEUTRAL.get(key, ())) or text.get(key) == value:
            continue
        raise ValueError(
            f"{key} is {short(value)}, beside text_config, where {family} is not known to have this key; if the text "
            "model needs it, it belongs into text_config: else take it out"
        )


# ------------------------------------------------------------------------------------------------------------- tensors


def family_name(name: str) -> str:
    """The text model's own name of a tensor of a multimodal file."""
    return "lm_head." + name.removeprefix(_HEAD) if name.startswith(_HEAD) else _PREFIX.sub("model.", name)


def is_other(name: str) -> bool:
    """Whether a tensor is of another modality's tower or projector, or of a layer that predicts further tokens."""
    return _OTHER.match(name) is not None


def skipped(names: Iterable[str]) -> dict[str, int]:
    """Tensors of a checkpoint that are not read, counted by the module that they are of."""
    found: dict[str, int] = {}
    for name in names:
        if match := _OTHER.match(name):
            module = match[0].rstrip(".")
            found[module] = found.get(module, 0) + 1
    return found


class RenamedCheckpoint(Checkpoint):
    """A checkpoint under its family's names.

    Attributes:
        whole: the checkpoint as it is on disk. stored: a tensor's own name -> its name there. rest: names of tensors
            that are not the model's.
    """

    def __init__(self, whole: Checkpoint, config: dict[str, Any], stored: Mapping[str, str]) -> None:
        self.whole, self.stored, self.rest = whole, stored, list[str]()
        super().__init__(whole.path, config, {name: whole.info(there) for name, there in stored.items()})

    def close(self) -> None:
        self.whole.close()

    def forget(self) -> None:
        self.whole.forget()

    def _read(self, name: str, dtype: torch.dtype | None) -> Tensor:
        self.info(name)
        return self.whole._read(self.stored[name], dtype)

    def stored_name(self, name: str) -> str:
        """Of a layer or tensor, the name that it would have there: that of what is beside it, part by part. A part
        stays where what is beside it has several names."""
        parts = name.split(".")
        return ".".join(self._parts.get(".".join(parts[: i + 1]), part) for i, part in enumerate(parts))

    @cached_property
    def _parts(self) -> dict[str, str]:
        """The last part of each beginning of an own name -> what it is there, where that is one name; of modules alone,
        not of the tensors in them."""
        found = defaultdict[str, set[str]](set)
        for own, there in self.stored.items():
            parts, others = own.split(".")[:-1], there.split(".")[:-1]
            if len(parts) == len(others):
                for i, other in enumerate(others):
                    found[".".join(parts[: i + 1])].add(other)
        return {own: names.pop() for own, names in found.items() if len(names) == 1}

    def all_tensors(self, own: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """What a whole checkpoint holds whose tensors are `own`, by the names that files have."""
        for name, tensor in own:
            yield self.stored.get(name) or self.stored_name(name), tensor
        for name in self.rest:
            yield name, self.whole.tensor(name)


class TextCheckpoint(RenamedCheckpoint):
    """The text model of a multimodal checkpoint as a checkpoint of its own, under the text model's names."""

    def __init__(self, whole: Checkpoint) -> None:
        rest = [name for name in whole.names if is_other(name) and not name.startswith(DRAFT)]
        apart = set(rest)
        stored = {family_name(name): name for name in whole.names if name not in apart}
        super().__init__(whole, dict(text_config(whole.config)), stored)
        self.rest = rest
        bodies = [body for body in _BODIES if any(name.startswith(body) for name in whole.names)]
        self._body = bodies[0] if bodies else "model."
        bare = any(name.startswith("lm_head.") for name in whole.names)
        self._head = _HEAD if self._body == _BODIES[0] and not bare else "lm_head."

    def stored_name(self, name: str) -> str:
        """Of a layer or tensor of the text model, the name that it has beside the other modalities."""
        if name == "lm_head" or name.startswith("lm_head."):
            return self._head[: -len("lm_head.")] + name
        return re.sub(r"^model\.", self._body, name)

    def whole_config(self, quantization: Mapping[str, Any]) -> dict[str, Any]:
        """The config.json of that checkpoint. `quantization` is by the text model's names, which are those of `layers`
        (E8P) or `ignore` (NVFP4, where modules of other modalities join the list)."""
        named = dict(quantization)
        if "layers" in named:
            named["layers"] = {self.stored_name(name): what for name, what in named["layers"].items()}
        if "ignore" in named:
            wide = {name for name in self.rest if name.endswith(".weight") and len(self.whole.shape(name)) == 2}
            kept = {name.removesuffix(".weight") for name in wide} | {
                self.stored_name(name) for name in named["ignore"]
            }
            named["ignore"] = sorted(kept)
        told = {key: value for key, value in self.whole.config.items() if key != "quantization_config"}
        return told | {"quantization_config": named}

    @property
    def rest_bytes(self) -> int:
        """Of tensors that are not the text model's."""
        return sum(self.whole.info(name).nbytes for name in self.rest)


def text_checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """The text model of a checkpoint under the names of its family; the checkpoint itself where it has no others."""
    if is_wrapper(checkpoint.config):
        return TextCheckpoint(checkpoint)
    traits = FAMILIES.get(str(checkpoint.config.get("model_type")))
    if traits is None or not traits.renames:
        return checkpoint
    return RenamedCheckpoint(checkpoint, checkpoint.config, {traits.own_name(name): name for name in checkpoint.names})
