"""What the engine asks of a model (`models.llama.Llama` and `models.deepseek_v4.DeepseekV4` give it)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from onegraph.nn.peers import Peers
from onegraph.nn.state import StateKind
from onegraph.ops.invariant import kept
from onegraph.runtime.graph import split_point

# By layer: `Decoder.run` fills in the hidden states behind each key.
AuxHiddenStates = dict[int, Tensor | None]


class Cache(Protocol):
    """The state of all sequences: what `Decoder.new_cache` makes. Each of `parts` lies on one stage's device, and a
    `view` of it has `block_table`, `positions`, `counts` and `slots` to set before a pass (`nn.attention.PagedCache`).

    prefix_cacheable: whether all state is in pages, or in slots of which there are snapshots, and a page's content a
        function of the tokens up to its end alone, whichever sequence and pass wrote it. Such pages may be shared, and
        a prefill writes what decoding would have.
    setting: how keys and values are stored, as `--kv` says it.
    kinds, rollback, tensors, reset, snapshot_slots, copy_slot: as of `nn.state.SequenceState`, which declares the kinds
        of state.
    """

    @property
    def setting(self) -> str: ...

    @property
    def prefix_cacheable(self) -> bool: ...

    @property
    def parts(self) -> list[Any]: ...
    @property
    def kinds(self) -> list[StateKind]: ...
    @property
    def rollback(self) -> int | None: ...
    @property
    def snapshot_slots(self) -> Sequence[int]: ...
    def tensors(self) -> list[Tensor]: ...
    def reset(self) -> None: ...
    def copy_slot(self, source: int, target: int) -> None: ...


class Model(Protocol):
    """What an engine runs.

    Attributes:
        ranks: that run every step together, each a decoder with its share of every layer; of most models the
            model itself, alone. peers: what several exchange through, None of one.
        config: with `vocab_size`.
        dtype: of activations. devices: of each rank's stages.
        max_context: positions that it has tables for. page_size: tokens of a page, unless the caller asks otherwise.
        embed: the module that gives tokens their vectors.
    """

    @property
    def ranks(self) -> Sequence["Decoder"]: ...
    @property
    def peers(self) -> Peers | None: ...
    @property
    def config(self) -> Any: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def devices(self) -> list[torch.device]: ...
    @property
    def max_context(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def embed(self) -> nn.Module: ...
    def named_buffers(self) -> Iterator[tuple[str, Tensor]]: ...  # the weights, as of a Module


class Decoder(Model, Protocol):
    """A model in stages, one for each device; tokens enter on the first, logits come out on the last. A pass is
    `enter`, `run` of each stage in order, `leave`; called, the model makes a whole one.

    Attributes:
        dense_attention: attends over whole sequences without a cache; None where a model attends only through the
            state that it keeps.
    """

    @property
    def dense_attention(self) -> Any: ...

    def __call__(self, tokens: Tensor, cache: Any) -> Tensor: ...  # int64 [B, Q] -> hidden [B, Q, D]

    # The stream is what one layer hands to the next. Between stages it is a tensor of `stream_shape` in `dtype`; within
    # the only stage it may be anything.
    def enter(self, tokens: Tensor) -> Any: ...  # int64 [B, Q] -> stream
    # -> stream, perhaps in place. taps: of this stage's layers, those that are keys get what is behind them [B, Q, D].
    def run(self, stage: int, stream: Any, tokens: Tensor, cache: Any, taps: AuxHiddenStates | None = None) -> Any: ...
    def leave(self, stream: Any) -> Tensor: ...  # -> hidden after the final norm [B, Q, D]
    def logits(self, hidden: Tensor) -> Tensor: ...  # [..., D] -> float32 [..., V]
    def stream_shape(self, rows: int, length: int) -> tuple[int, ...]: ...

    def new_cache(
        self, *, rows: int, pages: int, page_size: int, pages_per_row: int, kv: Any = None, spare: int = 0
    ) -> Cache:
        """State for `rows` sequences. kv: how keys and values are stored, None for the model's own way; ValueError
        where there is no other. spare: latest tokens of a sequence that may be taken back, DRAFTS - 1 at most."""
        ...


@dataclass(frozen=True)
class SplitAttention:
    """Attends through `cache`, a part of what the model made, so that a split mode can break there; a plain call
    elsewhere."""

    cache: Any

    def attend(self, attention: Any, *inputs: Tensor | None) -> Tensor:
        out: Tensor = split_point("attention", kept(self.cache.attend), attention, *inputs)
        return out
