"""A two-layer decoder over the real attention layer and paged cache, small enough to recompute everything densely."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from onegraph.formats.dense import DENSE
from onegraph.nn.attention import Attention, CausalAttention, PagedCache
from onegraph.nn.embedding import Embedding
from onegraph.nn.linear import dense
from onegraph.nn.turboquant import TurboQuantCache


class TinyDecoder(nn.Module):
    page_size = 16
    peers = None
    dense_attention = CausalAttention()

    def __init__(
        self,
        *,
        vocabulary=101,
        dim=32,
        layers=2,
        max_context=256,
        seed=0,
        head_dim=16,
        device="cpu",
        dtype=torch.float32,
    ):
        super().__init__()
        g = torch.Generator().manual_seed(seed)

        def weight(*shape, scale=1.0):
            return (torch.randn(shape, generator=g) * scale).to(device, dtype)

        self.config = SimpleNamespace(vocab_size=vocabulary)
        self.max_context, self.dtype, self.devices = max_context, dtype, [torch.device(device)]
        self.kv_heads, self.head_dim, heads = 2, head_dim, 4
        angle = torch.arange(max_context)[:, None] * 100.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
        tables = {"cos": angle.cos().to(device), "sin": angle.sin().to(device)}
        self.embed = Embedding(DENSE, {"weight": weight(vocabulary, dim)}, dtype)
        self.qkv, self.out = (
            nn.ModuleList(dense(weight(n, k, scale=dim**-0.5)) for _ in range(layers))
            for n, k in (((heads + 2 * self.kv_heads) * head_dim, dim), (dim, heads * head_dim))
        )
        self.layers = nn.ModuleList(
            Attention(
                index=i,
                heads=heads,
                kv_heads=self.kv_heads,
                head_dim=head_dim,
                **tables,
            )
            for i in range(layers)
        )
        self.head = dense(weight(vocabulary, dim, scale=dim**-0.5))

    def forward(self, tokens: Tensor, cache) -> Tensor:
        return self.leave(self.run(0, self.enter(tokens), tokens, cache))

    def enter(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)

    def run(self, stage: int, stream: Tensor, tokens: Tensor, cache) -> Tensor:
        for layer, qkv, out in zip(self.layers, self.qkv, self.out, strict=True):
            stream = stream + torch.tanh(out(cache.attend(layer, qkv(stream)))) * 2
        return stream

    def leave(self, stream: Tensor) -> Tensor:
        return stream

    def stream_shape(self, rows: int, length: int) -> tuple[int, ...]:
        return rows, length, self.embed.weight.shape[1]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden).float() * 3

    @property
    def ranks(self):
        return [self]

    def new_cache(self, *, rows, pages, page_size, pages_per_row, kv=None, spare=0) -> PagedCache | TurboQuantCache:
        sizes = {
            "layers": len(self.layers),
            "pages": pages,
            "page_size": page_size,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rows": rows,
            "pages_per_row": pages_per_row,
            "device": self.devices[0],
            "dtype": self.dtype,
        }
        return PagedCache(**sizes) if kv is None else TurboQuantCache(kv, **sizes)

    @torch.no_grad()
    def dense_logits(self, tokens: list[int]) -> Tensor:
        """Logits after the last token, from a pass over the whole sequence without a cache, [1, V]."""
        hidden = self(torch.tensor([tokens], device=self.devices[0]), CausalAttention())
        return self.logits(hidden[:, -1])
