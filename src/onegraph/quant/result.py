"""What quantizing made: tensors of each layer in memory or on disk, and the checkpoint that they become."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from onegraph.formats.rotated import RotatedConfig
from onegraph.formats.weight import Tensors
from onegraph.quant.resumable import ResumableWork

HEAD, EMBED = "lm_head", "model.embed_tokens"


class Layers(Mapping[str, Tensors]):
    """Quantized linears by name, sorted, their checkpoint tensors on the CPU. Those of pieces on disk are read when
    they are asked for, and one piece is in memory at a time."""

    def __init__(self, partial: ResumableWork | None) -> None:
        self._partial = partial
        self._held: dict[str, Tensors] = {}
        self._pieces: dict[str, tuple[str, str]] = {}  # linear -> name and key of its piece
        self._latest: tuple[tuple[str, str], dict[str, Tensors]] | None = None

    def put(self, name: str, key: str, made: Mapping[str, Tensors]) -> None:
        """The piece `name` with all its linears; it replaces what was known of them."""
        if self._partial is None:
            self._held |= {owner: {k: v.cpu() for k, v in tensors.items()} for owner, tensors in made.items()}
        else:
            self._pieces |= dict.fromkeys(made, (name, key))

    def __getitem__(self, linear: str) -> Tensors:
        if self._partial is None:
            found = self._held[linear]
        else:
            piece = self._pieces[linear]
            if self._latest is None or self._latest[0] != piece:
                self._latest = None  # two pieces are not in memory at once
                self._latest = piece, load_piece(self._partial, *piece) or {}
            found = self._latest[1][linear]
        return dict(sorted(found.items()))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._held if self._partial is None else self._pieces))

    def __len__(self) -> int:
        return len(self._held if self._partial is None else self._pieces)

    def __contains__(self, linear: object) -> bool:
        return linear in self._held or linear in self._pieces


def load_piece(partial: ResumableWork | None, name: str, key: str) -> dict[str, Tensors] | None:
    """Linears of a piece on disk, None where it is not there."""
    found = None if partial is None else partial.load(name, key)
    if found is None:
        return None
    layers: dict[str, Tensors] = {}
    for full, tensor in found.items():
        owner, _, suffix = full.rpartition(".")
        layers.setdefault(owner, {})[suffix] = tensor
    return layers


@dataclass(frozen=True)
class Quantized:
    """What `quantize` made: the config for config.json and, per linear or stack of experts, its checkpoint tensors on
    the CPU.

    Where finished blocks are kept on disk, so are `layers`: they can be read until the `ResumableWork` is removed.
    `counts` are the calibration tokens that chose each expert, by the names of the stacks that share them.
    """

    config: RotatedConfig
    layers: Mapping[str, Tensors]
    counts: Mapping[tuple[str, str], list[int]] = field(default_factory=dict)

    def tensors(
        self,
        names: Iterable[str],
        read: Callable[[str], Tensor],
        layer_of: Callable[[str], str | None] = lambda name: name.removesuffix(".weight"),
    ) -> Iterator[tuple[str, Tensor]]:
        """All tensors of the new checkpoint, from those of the source: `names`, and `read` to get one.

        Weights of quantized linears are replaced; everything else goes through as it is. Quantizing the embedding alone
        of a tied model leaves its head the old weight, under the head's own name.

        Args:
            layer_of: the linear or stack of experts whose weight a tensor of the source is, or is a part of.
        """
        names = list(names)
        written: set[str] = set()
        for name in names:
            owner, _, kind = name.rpartition(".")
            layer = layer_of(f"{owner}.weight" if kind == "bias" else name)
            if layer is None or layer not in self.layers:
                if owner in self.layers:
                    raise ValueError(f"the source has the tensor {name!r}, which a quantized linear cannot keep")
                yield name, read(name)
            elif kind == "bias":
                yield f"{layer}.bias", read(name).float()
            elif layer not in written:
                written.add(layer)
                yield from ((f"{layer}.{suffix}", tensor) for suffix, tensor in self.layers[layer].items())
        tied = f"{HEAD}.weight" not in names
        if tied and HEAD in self.layers:
            yield from ((f"{HEAD}.{suffix}", tensor) for suffix, tensor in self.layers[HEAD].items())
        elif tied and EMBED in self.layers:
            yield f"{HEAD}.weight", read(f"{EMBED}.weight")
