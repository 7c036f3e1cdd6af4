"""What ops with many arguments are called with: one record each, whose fields are the arguments of the op's schema.

An op of such a record is called as any other, its reference, checks and kernel are given the record. Kernels read the
records too, so this file imports nothing of ours.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

Written = Annotated[Tensor, "written"]  # an argument that the op writes

MAX_TOKENS = 8  # that a round brings a row: the newest and its drafts

# What a step's report says in place of a token:
NAN_TOKEN = -1  # the model gave NaN
NO_TOKEN = -2  # none
NAN_DRAFTS = -3  # none, since the model gave NaN beside drafts, which lies in the cache now


@dataclass(eq=False)
class Call:
    """Fields are Tensor, Written, lists of these, int, float, bool or str; any may be optional. The last ones may have
    a default."""

    def __iter__(self) -> Iterator[Any]:
        """The arguments, in the schema's order."""
        names: tuple[str, ...] = self.__match_args__
        return (getattr(self, name) for name in names)

    @classmethod
    def schema(cls) -> str:
        """As torch's schema language writes the arguments."""
        marks, found = iter("abcdefgh"), list[str]()
        hints: dict[str, Any] = get_type_hints(cls, include_extras=True)
        for name, kind in hints.items():
            optional = NoneType in get_args(kind)
            kind = get_args(kind)[0] if optional else kind
            of = get_args(kind)[0] if get_origin(kind) is list else kind
            text = (f"Tensor({next(marks)}!)" if of == Written else of.__name__) + "[]" * (of is not kind)
            default = f"={getattr(cls, name)}" if hasattr(cls, name) else ""
            found.append(f"{text}{'?' * optional} {name}{default}")
        return ", ".join(found)


@dataclass(eq=False)
class AdjustLogits(Call):
    """See `ops.shaping.adjust_logits`."""

    logits: Tensor
    last: Tensor
    slots: Tensor
    seen: Written
    allowed: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    constrained: Tensor


@dataclass(eq=False)
class RotatedLinear(Call):
    """What linears have in common whose weights are rotated: a subclass has `x`, `n`, `k`, and a linear `wide`."""

    @property
    def tokens(self: Any) -> int:
        count: int = self.x.shape[:-1].numel()
        return count

    @property
    def result(self: Any) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a linear's result."""
        return (*self.x.shape[:-1], self.n), torch.float32 if self.wide else self.x.dtype


@dataclass(eq=False)
class E8PLayer(RotatedLinear):
    """Activations and the layer that multiplies them; see `ops.e8p.e8p_linear`."""

    x: Tensor
    codes: Tensor
    residual: Tensor | None
    codebook: Tensor
    in_scale: Tensor
    out_scale: Tensor
    bias: Tensor | None
    bits: int

    @property
    def n(self) -> int:
        return self.codes.shape[0]

    @property
    def k(self) -> int:
        return self.codes.shape[1] * 8


@dataclass(eq=False)
class E8PLinear(E8PLayer):
    """See `ops.e8p.e8p_linear`."""

    add: Tensor | None = None
    eps: float | None = None
    silu: bool = False
    wide: bool = False


@dataclass(eq=False)
class TrellisLinear(RotatedLinear):
    """See `ops.trellis.trellis_linear`."""

    x: Tensor
    codes: Tensor
    in_scale: Tensor
    out_scale: Tensor
    bias: Tensor | None
    bits: int
    add: Tensor | None = None
    eps: float | None = None
    silu: bool = False
    wide: bool = False
    code: int = 0

    @property
    def n(self) -> int:
        return self.codes.shape[0] * 16

    @property
    def k(self) -> int:
        return self.codes.shape[1] // self.bits


@dataclass(eq=False)
class E8PAllReduce(E8PLayer):
    """See `ops.e8p_all_reduce.e8p_all_reduce`."""

    add: Tensor | None
    silu: bool
    inboxes: list[Written]
    state: Written
    alarm: Written
    rank: int

    def product(self, *, add: Tensor | None = None, wide: bool = False) -> E8PLinear:
        """The rank's own linear."""
        scales = self.in_scale, self.out_scale
        return E8PLinear(
            self.x, self.codes, self.residual, self.codebook, *scales, self.bias, self.bits, add, None, self.silu, wide
        )

    @property
    def group(self) -> tuple[list[Tensor], Tensor, Tensor, int]:
        return self.inboxes, self.state, self.alarm, self.rank


@dataclass(eq=False)
class TrellisExperts(Call):
    """See `ops.trellis_experts.trellis_experts`."""

    x: Tensor
    experts: Tensor
    weights: Tensor
    gate_up: Tensor
    gate_up_in_scale: Tensor
    gate_up_out_scale: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_in_scale: Tensor
    down_out_scale: Tensor
    down_bias: Tensor | None
    bits: int
    limit: float
    alpha: float
    shift: float
    code: int = 0


@dataclass(eq=False)
class E8PExperts(Call):
    """See `ops.e8p_experts.e8p_experts`."""

    x: Tensor
    experts: Tensor
    weights: Tensor
    codebook: Tensor
    gate_up: Tensor
    gate_up_residual: Tensor | None
    gate_up_in_scale: Tensor
    gate_up_out_scale: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_residual: Tensor | None
    down_in_scale: Tensor
    down_out_scale: Tensor
    down_bias: Tensor | None
    bits: int
    limit: float
    alpha: float
    shift: float
    add: Tensor | None = None


@dataclass(eq=False)
class NormedRoute(Call):
    """See `ops.normed_route.normed_route`."""

    x: Tensor
    norm: Tensor
    eps: float
    gate: Tensor
    bias: Tensor | None
    scales: Tensor | None
    top_k: int
    normalise: bool
    groups: int
    top_groups: int
    factor: float
    shared: bool
    gated: bool
    residual: Tensor | None = None
    post: Tensor | None = None

    @property
    def count(self) -> int:
        """Experts to choose from."""
        return self.gate.shape[0] - self.gated

    @property
    def norms(self) -> int:
        return self.norm.shape[:-1].numel()


# Of a cache of experts: what its kernel takes, and its scores: a call takes 1 / 2**DECAY off them and adds 2**GAIN for
# each bit of the number of tokens that chose the expert. Sums stay an int32: 31 bits in each call make 31 << 25.
MAX_EXPERTS, MAX_FIELDS = 512, 16
DECAY, GAIN = 10, 15


@dataclass(eq=False)
class ExpertCache(Call):
    """See `ops.expert_cache.expert_cache`."""

    experts: Tensor
    host: list[Tensor]
    slots: list[Written]
    shared: list[Written]
    resident: Written
    score: Written
    arrived: Written


@dataclass(eq=False)
class Heads(Call):
    """Queries, keys and values as a linear gave them, and what turns them; see `ops.attention.rope_cache_write`."""

    qkv: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    cos: Tensor | None
    sin: Tensor | None
    positions: Tensor


@dataclass(eq=False)
class Tokens(Heads):
    """Those of a step, and which pages take them."""

    counts: Tensor
    block_table: Tensor


@dataclass(eq=False)
class RopeCacheWrite(Heads):
    """See `ops.attention.rope_cache_write`."""

    counts: Tensor | None
    block_table: Tensor | None
    k_cache: Written
    v_cache: Written
    heads: int
    slots: Tensor | None = None

    @property
    def queries_alone(self) -> bool:
        """Whether qkv has neither keys nor values."""
        return self.qkv.shape[-1] == self.heads * self.k_cache.shape[3]


@dataclass(eq=False)
class PagedAttention(Call):
    """See `ops.attention.paged_attention`."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    positions: Tensor
    scale: float
    window: int
    sinks: Tensor | None = None
    softcap: float = 0.0
    counts: Tensor | None = None


@dataclass(eq=False)
class PagedDecode(Tokens):
    """See `ops.decode_attention.paged_decode`."""

    k_cache: Written
    v_cache: Written
    tickets: Written
    heads: int
    scale: float
    window: int
    early: bool = False
    sinks: Tensor | None = None
    softcap: float = 0.0
    gated: bool = False
    value_norm: bool = False

    def token(self, i: int) -> "PagedDecode":
        """The step of each row's token i alone."""
        positions = self.positions + i  # before the others: a kernel may read it before it waits for the last of them
        counts = (self.counts > i).to(self.counts.dtype)
        return replace(self, qkv=self.qkv[:, i : i + 1].contiguous(), positions=positions, counts=counts)

    def write(self) -> tuple[Any, ...]:
        """Arguments of `rope_cache_write`."""
        *tokens, _, heads, _, _, _, _, _, _, _ = self
        return *tokens, heads

    def attention(self, q: Tensor) -> tuple[Any, ...]:
        """Arguments of `paged_attention` for the queries that `rope_cache_write` returned."""
        cache = self.k_cache, self.v_cache, self.block_table, self.positions
        return q, *cache, self.scale, self.window, self.sinks, self.softcap, self.counts

    def composed(self, write: Callable[..., Tensor], attend: Callable[..., Tensor]) -> Tensor:
        """By the two ops that it stands for, which have no gates."""
        return attend(*self.attention(write(*self.write())))

    def values_normed(self, norm: Callable[..., Tensor]) -> "PagedDecode":
        """The same with values that are normed already, by `ops.values.normed_values`."""
        if not self.value_norm:
            return self
        kv_heads, dim = self.k_cache.shape[2:]
        return replace(self, qkv=norm(self.qkv, self.heads, kv_heads, dim, self.eps), value_norm=False)

    def ungated(
        self,
        attend: "Callable[[PagedDecode], Tensor]",
        split: Callable[..., tuple[Tensor, Tensor]],
        gate: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """What `attend`, which knows no gates, gives; with those that there are, by the two ops of `ops.gate`."""
        if not self.gated:
            return attend(self)
        qkv, gates = split(self.qkv, self.heads, self.k_cache.shape[3])
        out = attend(replace(self, qkv=qkv, gated=False))
        return gate(out, gates.view_as(out))


@dataclass(eq=False)
class StridedDecode(Call):
    """See `ops.strided_decode.strided_decode`."""

    qkv: Tensor
    table: Tensor
    lengths: Tensor
    block_table: Tensor
    keys: Written
    values: Written
    out: Written
    scale: float


@dataclass(eq=False)
class TurboQuantWrite(Tokens):
    """See `ops.turboquant.turboquant_write`."""

    turn: Tensor
    k_codebook: Tensor
    v_codebook: Tensor
    cache: Written
    ring: Written | None
    slots: Tensor | None
    heads: int
    kind: str
    exact: bool


@dataclass(eq=False)
class TurboQuantAttention(Call):
    """See `ops.turboquant_attention.turboquant_attention`."""

    q: Tensor
    cache: Tensor
    block_table: Tensor
    positions: Tensor
    counts: Tensor
    ends: Tensor | None
    rotation: Tensor | None
    k_codebook: Tensor
    v_codebook: Tensor
    sinks: Tensor | None
    scale: float
    window: int


@dataclass(eq=False)
class TurboQuantHybrid(Call):
    """See `ops.turboquant_hybrid.turboquant_hybrid`."""

    q: Tensor
    cache: Tensor
    block_table: Tensor
    positions: Tensor
    counts: Tensor
    ring: Tensor
    slots: Tensor
    rotation: Tensor
    k_codebook: Tensor
    v_codebook: Tensor
    scale: float
    window: int
    limit: int


@dataclass(eq=False)
class TurboQuantDecode(Tokens):
    """See `ops.turboquant_decode.turboquant_decode`."""

    turn: Tensor
    k_codebook: Tensor
    v_codebook: Tensor
    cache: Written
    ring: Written
    slots: Tensor
    heads: int
    kind: str
    rotation: Tensor
    scale: float
    window: int
    limit: int
    early: bool = False


@dataclass(eq=False)
class RecentAttention(Call):
    """See `ops.recent_attention.recent_attention`."""

    q: Tensor
    ring: Tensor
    slots: Tensor
    positions: Tensor
    history: Tensor | None
    history_lse: Tensor | None
    rotation: Tensor
    scale: float
    window: int
    spare: int
    limit: int


@dataclass(eq=False)
class DeepseekAttention(Call):
    """See `ops.deepseek_attention.deepseek_attention`."""

    q: Tensor
    kv: Tensor
    ring: Written
    sinks: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor
    positions: Tensor
    counts: Tensor
    block_table: Tensor
    entries: Tensor | None
    selected: Tensor | None
    ratio: int
    window: int
    scale: float


@dataclass(eq=False)
class DeepseekCompress(Call):
    """See `ops.deepseek_compress.deepseek_compress`."""

    states: Tensor
    ring: Written
    bias: Tensor
    norm: Tensor
    eps: float
    cos: Tensor
    sin: Tensor
    slots: Tensor
    positions: Tensor
    counts: Tensor
    block_table: Tensor
    entries: Written


@dataclass(eq=False)
class DeepseekPrepare(Call):
    """See `ops.deepseek_prepare.deepseek_prepare`."""

    q: Tensor
    kv: Tensor
    kv_norm: Tensor
    eps: float
    cos: Tensor
    sin: Tensor
    fp8: bool
    slots: Tensor
    positions: Tensor
    counts: Tensor
    block_table: Tensor
    states: Tensor
    ring: Written
    bias: Tensor
    norm: Tensor
    entries: Written
    index_states: Tensor | None
    index_ring: Written | None
    index_bias: Tensor | None
    index_norm: Tensor | None
    index_entries: Written | None

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor, float, Tensor, Tensor, Tensor, bool]:
        """The arguments of `deepseek_qkv`."""
        return self.q, self.kv, self.kv_norm, self.eps, self.cos, self.sin, self.positions, self.fp8

    @property
    def compressed(self) -> list[DeepseekCompress]:
        """What is to be compressed: the attention's states, and the indexer's where there are such."""
        index = self.index_states, self.index_ring, self.index_bias, self.index_norm, self.index_entries
        found = [
            (self.states, self.ring, self.bias, self.norm, self.entries),
            *([index] if self.index_states is not None else []),
        ]
        return [
            DeepseekCompress(
                states, ring, bias, norm, self.eps, self.cos, self.sin,  # type: ignore[arg-type]  # none of them is None
                self.slots, self.positions, self.counts, self.block_table, entries,  # type: ignore[arg-type]
            )
            for states, ring, bias, norm, entries in found
        ]  # fmt: skip


@dataclass(eq=False)
class DeepseekIndex(Call):
    """See `ops.deepseek_index.deepseek_index`."""

    q: Tensor
    weights: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor
    counts: Tensor
    block_table: Tensor
    entries: Tensor
    ratio: int
    top_k: int


@dataclass(eq=False)
class ShortConv(Call):
    """See `ops.short_conv.short_conv`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    ring: Written
    slots: Tensor
    positions: Tensor
    counts: Tensor
    silu: bool
    gated: bool


@dataclass(eq=False)
class GatedDelta(Call):
    """See `ops.gated_delta.gated_delta`."""

    qkv: Tensor
    z: Tensor
    b: Tensor | None
    a: Tensor | None
    weight: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    ring: Written
    state: Written
    base: Written
    keys: Written
    deltas: Written
    decays: Written
    slots: Tensor
    positions: Tensor
    counts: Tensor
    limit: int
    sigmoid: bool = False
    beta_scale: float = 1.0
    x: Tensor | None = None
    rates: Tensor | None = None
    x_norm: Tensor | None = None
    x_eps: float = 0.0


@dataclass(eq=False)
class Mamba2(Call):
    """See `ops.mamba2.mamba2`."""

    xbc: Tensor
    z: Tensor
    dt: Tensor
    weight: Tensor
    bias: Tensor | None
    a_log: Tensor
    dt_bias: Tensor
    skip: Tensor
    norm: Tensor | None
    eps: float
    ring: Written
    state: Written
    base: Written
    keys: Written
    deltas: Written
    decays: Written
    slots: Tensor
    positions: Tensor
    counts: Tensor
    limit: int
    dt_min: float = 0.0


@dataclass(eq=False)
class LatentWrite(Call):
    """See `ops.latent_attention.latent_write`."""

    q: Tensor
    latent: Tensor
    norm: Tensor
    eps: float
    cos: Tensor
    sin: Tensor
    positions: Tensor
    counts: Tensor
    block_table: Tensor
    pool: Written
    interleaved: bool
    bits: int
    curve: Tensor | None
    kind: str


@dataclass(eq=False)
class LatentAttention(Call):
    """See `ops.latent_attention.latent_attention`."""

    q: Tensor
    q_rope: Tensor
    pool: Tensor
    block_table: Tensor
    positions: Tensor
    counts: Tensor
    selected: Tensor | None
    scale: float
    bits: int
    curve: Tensor | None
