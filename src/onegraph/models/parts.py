"""What a family of models tells the loader: which layers and tensors a decoder has, and how files name them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from onegraph.formats.weight import Dtypes, Quantization, Shape


@dataclass(frozen=True)
class Component:
    """A set of layers that a precision map would treat as one.

    Args:
        paths: of its modules or buffers in the model, * for each block.
        layers: a pattern of its layers' names, by the family's names.
    """

    paths: tuple[str, ...]
    layers: str


class Stack(NamedTuple):
    """The matrices n x k of all `experts` in one tensor, biases beside it if `bias`; dense ones may lie `transposed`,
    k x n."""

    experts: int
    n: int
    k: int
    transposed: bool
    bias: bool


@dataclass(frozen=True)
class Parts:
    """What a model of a family is made of, by the family's names.

    Args:
        linears: layers that may be in any format: (outputs, inputs, has a bias); the head is one.
        stacks: experts that files hold in one tensor, named without what a format adds (`formats/fused.py`).
        single: stacks that this file has one expert at a time, which a rate map may name to keep.
        steady: linears that onegraph never rounds, whatever it is asked.
        embedding: name and size (rows, columns) of the token embedding.
        tensors: everything else: shape and the dtypes allowed. A linear that must stay dense stands here.
        head: the linear to logits; tied: whether it may be the embedding's own weight.
        shared: linears and the embedding that this file does not have, because another model's stand for them.
        components: by name, for `eval --ab`.
        ignored: whether a file may hold a tensor of this name although nothing reads it.
    """

    linears: dict[str, tuple[int, int, bool]]
    embedding: tuple[str, tuple[int, int]]
    head: str
    tensors: Mapping[str, tuple[Shape, Dtypes]]
    stacks: Mapping[str, Stack] = field(default_factory=dict)
    single: tuple[str, ...] = ()
    steady: tuple[str, ...] = ()
    tied: bool = False
    shared: tuple[str, ...] = ()
    components: Mapping[str, Component] = field(default_factory=dict)
    ignored: Callable[[str], bool] = field(default=lambda name: False)

    def component_of(self, layer: str) -> str | None:
        """The component that a layer belongs to."""
        return next((name for name, part in self.components.items() if re.search(part.layers, layer)), None)


class Family(Protocol):
    """What a loader asks of a parsed config.json; `models.config.LlamaConfig` is one."""

    @property
    def quantization(self) -> Quantization | None: ...
    @property
    def parts(self) -> Parts: ...
    def family_name(self, name: str) -> str: ...  # of a tensor, from the name that a file has for it
