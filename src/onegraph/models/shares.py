"""Which part of each layer a rank has, where several devices run every layer together.

Heads and hidden units are cut, so that a rank computes its queries, keys, values and hidden units alone, and two sums
over all ranks a layer bring the results together (Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3). What a
format cannot cut there is refused with the counts that it can.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from onegraph.formats.weight import Part, WeightFormat
from onegraph.models.config import LlamaConfig
from onegraph.models.loader import Loader
from onegraph.models.mixers import NoMixer, Pieces, RecurrentMixer
from onegraph.models.routed import Routed, Shared
from onegraph.nn.peers import Peer
from onegraph.ops.ranks import MAX_RANKS, part_of

Span = tuple[int, int]
UNITS = (128, 64, 32, 16, 8, 1)  # rows of the head that stay together: what a format rotates, and whole cache lines
# Of H200s: bytes a second at which no linear reads more weight (measured for one token: 3.5 TB/s in E8P at 2 bits, 4.0
# at 4 bits, 4.5 in bfloat16), and seconds of an exchange within a step (2.2 to 2.6 us on two and four).
READ_RATE, EXCHANGE_S = 4.8e12, 2.5e-6


@dataclass(frozen=True)
class TPShard:
    """One of `ranks` equal parts."""

    rank: int = 0
    ranks: int = 1

    @property
    def whole(self) -> bool:
        return self.ranks == 1

    def span(self, size: int) -> Span:
        """First and last of `size`, which the ranks divide, or which divides them: then several have the same one."""
        if size < self.ranks:
            one = self.rank * size // self.ranks
            return one, one + 1
        return size * self.rank // self.ranks, size * (self.rank + 1) // self.ranks

    def pieces(self, *sizes: int, unit: int = 1) -> list[Span]:
        """Of pieces that lie one behind the other, in units, each one's part: where it lies among all of them."""
        found, start = list[Span](), 0
        for size in sizes:
            first, last = self.span(size)
            found.append((start + first * unit, start + last * unit))
            start += size * unit
        return found


ALL = TPShard()


def qkv_parts(config: LlamaConfig, share: TPShard, layer: int) -> list[tuple[str, Part]]:
    """Within a block: the linears of `config.qkv_at`, by name, and of each the rows of a rank's heads."""
    heads, names = config.attention[layer], config.qkv_at(layer)
    queries = config.heads * (2 if config.traits.output_gate else 1)  # each head's gate lies behind it
    sizes = queries, heads.kv_heads, heads.kv_heads
    return _rows(names, sizes if len(config.qkv) == 1 else sizes[: len(names)], share, heads.dim)


def gate_up_parts(config: LlamaConfig, share: TPShard, layer: int) -> list[tuple[str, Part]]:
    """The same of `config.gate_up` and hidden units."""
    return _rows(config.gate_up, (config.inner_at(layer),) * (1 if config.traits.relu2 else 2), share)


def shared_parts(routed: Routed, shared: Shared, share: TPShard) -> list[tuple[str, Part]]:
    """Each linear of a shared expert, by its name within the block, and what a rank has of it: of down the columns."""
    *front, down = shared.linears
    return [*_rows(tuple(front), (shared.size,) * routed.parts, share), (down, columns(share, shared.size))]


def _rows(names: tuple[str, ...], sizes: tuple[int, ...], share: TPShard, unit: int = 1) -> list[tuple[str, Part]]:
    if share.whole:
        return [(name, Part()) for name in names]
    if len(names) == 1:  # files hold them as one
        return [(names[0], Part(rows=span)) for span in share.pieces(*sizes, unit=unit)]
    spans = [share.pieces(size, unit=unit)[0] for size in sizes]
    return [(name, Part(rows=span)) for name, span in zip(names, spans, strict=True)]


def share_of(peer: Peer | None) -> TPShard:
    """What of every layer a rank has; all of it where there is one."""
    return ALL if peer is None else TPShard(peer.index, peer.count)


def rows(share: TPShard, size: int, unit: int = 1) -> Part:
    """The outputs that a rank has, of `size` units."""
    first, last = share.span(size)
    return Part() if share.whole else Part(rows=(first * unit, last * unit))


def columns(share: TPShard, size: int, unit: int = 1) -> Part:
    """The inputs that a rank has, of `size` units."""
    first, last = share.span(size)
    return Part() if share.whole else Part(columns=(first * unit, last * unit))


def head_unit(format: WeightFormat, vocabulary: int, hidden: int, ranks: int) -> int | None:
    """Rows of the head that stay together where ranks share it; None where it cannot be cut: then each has all."""
    for unit in UNITS if ranks > 1 else ():
        spans = [part_of(vocabulary, unit, ranks, rank) for rank in range(ranks)]
        if all(
            first < last and not refusal(format, vocabulary, hidden, Part(rows=(first, last))) for first, last in spans
        ):
            return unit
    return None


def head_part(loader: Loader, vocabulary: int, hidden: int, peer: Peer | None) -> tuple[int | None, Part]:
    """`head_unit` of a model, and the rank's part of its head."""
    if peer is None:
        return None, Part()
    name = loader.parts.embedding[0] if loader.tied else loader.parts.head
    unit = head_unit(loader.format_of(name), vocabulary, hidden, peer.count)
    return unit, Part() if unit is None else Part(rows=part_of(vocabulary, unit, peer.count, peer.index))


def attention_parts(config: LlamaConfig, share: TPShard, layer: int) -> list[tuple[str, Part]]:
    """Each linear of a layer's attention, by its name within the block, and what a rank has of it."""
    if config.latent is not None:
        from onegraph.models.latent import latent_parts

        return latent_parts(config.latent, share)
    out = config.traits.names.out, columns(share, config.heads, config.attention[layer].dim)
    return [*qkv_parts(config, share, layer), out]


def piece_spans(pieces: Pieces, share: TPShard) -> list[Span]:
    """Of rows that lie one piece behind the other, those of a rank: first and last of each."""
    found, start = list[Span](), 0
    for count, unit in pieces:
        first, last = share.span(count)
        found.append((start + first * unit, start + last * unit))
        start += count * unit
    return found


def mixer_parts(mixer: RecurrentMixer, name: str, share: TPShard) -> list[Part]:
    """What a rank has of a linear of a recurrent layer, by its name within the block, one part behind the other."""
    if share.whole:
        return [Part()]
    if name == mixer.out:
        return [columns(share, *mixer.behind_heads)]
    spans = piece_spans(mixer.cuts[name], share) if name in mixer.cuts else None
    return [Part()] if spans is None else [Part(rows=span) for span in spans]


def check_shares(obstacle: Callable[[int], str], ranks: int) -> None:
    """Raises ValueError where so many ranks cannot share a model, with the counts that can.

    obstacle: why a count cannot, empty where it can.
    """
    if why := obstacle(ranks):
        able = [str(count) for count in range(2, MAX_RANKS + 1) if not obstacle(count)]
        raise ValueError(f"gpus is {ranks}: {why}; use {' or '.join(['1', *able])}")


def check_ranks(loader: Loader, config: LlamaConfig, ranks: int) -> None:
    """`check_shares` of a model of the Llama kind."""
    check_shares(lambda count: _obstacle(config, loader, count), ranks)


def shares_draft(loader: Loader, config: LlamaConfig, ranks: int) -> bool:
    """Whether ranks share what drafts; else each has all of it: where they cannot share it, or where a token gains less
    time by fewer bytes than it loses by exchanges.

    A layer has two all-reduces. Gathering logits takes about as long as two more (4.8 us for 128,256 on two GPUs). The
    gain is estimated low: at 45 us for Llama-3-8B in E8P at 2 bits on two GPUs, where 185 were measured, and at 2.4 ms
    for 70B on four, where 3.9 were measured.
    """
    if ranks == 1 or _obstacle(config, loader, ranks):
        return False
    saved_s = (1 - 1 / ranks) * read_bytes(loader, config) / READ_RATE
    return saved_s > (2 * config.layers + 2) * EXCHANGE_S


def read_bytes(loader: Loader, config: LlamaConfig) -> int:
    """Bytes of weights of blocks and head that a token reads."""
    head = loader.parts.embedding[0] if loader.tied else loader.parts.head
    blocks = tuple(config.prefix(i) for i in range(config.layers))
    found = sum(size for name, size in loader.device_bytes().items() if name == head or name.startswith(blocks))
    if (routed := config.routed) is None:
        return found
    return found - sum(loader.expert_bytes.values()) * (routed.count - routed.top_k) // routed.count


def _obstacle(config: LlamaConfig, loader: Loader, ranks: int) -> str:
    for mixer in dict.fromkeys(config.mixers):
        for what, count in {} if mixer is None or isinstance(mixer, NoMixer) else mixer.heads.items():
            if count % ranks:
                return f"{count} {what} cannot be split evenly"
    if config.heads % ranks:
        return f"{config.heads} attention heads cannot be split evenly"
    for kv_heads in dict.fromkeys(heads.kv_heads for heads in config.attention):
        if kv_heads % ranks and ranks % kv_heads:
            return f"{kv_heads} KV heads cannot be split evenly or replicated evenly"
    routed = config.routed
    widths = {"hidden units": config.intermediate_size} if routed is None or not all(routed.layers) else {}
    widths |= {} if routed is None else {"hidden units of an expert": routed.size}
    widths |= (
        {} if routed is None or routed.shared is None else {"hidden units of the shared expert": routed.shared.size}
    )
    for what, size in widths.items():
        if size % ranks:
            return f"{size} {what} cannot be split evenly"
    for name, format, n, k, part in _cuts(config, loader, TPShard(1, ranks)):
        if why := refusal(format, n, k, part):
            return f"{name} in {format}: {why}"
    return ""


def _cuts(config: LlamaConfig, loader: Loader, share: TPShard) -> Iterator[tuple[str, WeightFormat, int, int, Part]]:
    """Every layer that a rank has a part of: name, format, outputs, inputs, part."""
    sizes = loader.layers()
    for i in range(config.layers):
        prefix, routed = config.prefix(i), config.routed_at(i)
        parts, mixer = list[tuple[str, Part]](), config.mixers[i]
        if mixer is None:
            parts = attention_parts(config, share, i)
        elif not isinstance(mixer, NoMixer):
            names = *mixer.inputs, mixer.out  # what is never rounded is cut where it is dense
            parts = [(name, part) for name in names for part in mixer_parts(mixer, name, share)]
        if not config.feeds(i):
            pass
        elif routed is None:
            parts += [*gate_up_parts(config, share, i), (config.traits.names.down, columns(share, config.inner_at(i)))]
        elif routed.shared is not None:
            parts += shared_parts(routed, routed.shared, share)
        for name, part in parts:
            yield prefix + name, loader.format_of(prefix + name), *sizes[prefix + name][:2], part
        if routed is not None:
            yield from _expert_cuts(config, loader, share, prefix)


def _expert_cuts(
    config: LlamaConfig, loader: Loader, share: TPShard, prefix: str
) -> Iterator[tuple[str, WeightFormat, int, int, Part]]:
    routed = config.routed
    assert routed is not None
    size = routed.latent or config.hidden_size
    if routed.stacked(prefix, loader.quantization):
        gate_up, down = (prefix + name for name in routed.whole)
        for span in share.pieces(*[routed.size] * routed.parts):
            yield gate_up, loader.stack(gate_up)[0], routed.parts * routed.size, size, Part(rows=span)
        yield down, loader.stack(down)[0], size, routed.size, columns(share, routed.size)
        return
    *front, down = routed.names(0)  # each is cut alike
    for name in front:
        yield prefix + name, loader.format_of(prefix + name), routed.size, size, Part(rows=share.span(routed.size))
    yield prefix + down, loader.format_of(prefix + down), size, routed.size, columns(share, routed.size)


def refusal(format: WeightFormat, n: int, k: int, part: Part) -> str:
    """Why the part of a layer of n x k is no layer of this format; empty where it is one."""
    try:
        format.check_part(n, k, part)
    except ValueError as error:
        return str(error)
    return ""
