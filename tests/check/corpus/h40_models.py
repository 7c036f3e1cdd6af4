"""Whole little models: what decoders do right, so that precision is measured on more than single lines."""

import torch
from torch import nn
from torch.nn import functional as F


class Decoder(nn.Module):
    """Two pre-norm layers with a static KV cache, masked by position."""

    def __init__(self, cached: str):
        super().__init__()
        self.cached = cached
        self.embed = nn.Embedding(32, 16)
        self.qkv = nn.ModuleList(nn.Linear(16, 48, bias=False) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))
        self.mlp = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norm = nn.ModuleList(nn.LayerNorm(16) for _ in range(4))
        self.register_buffer("keys", torch.zeros(2, 16, 16), persistent=False)
        self.register_buffer("values", torch.zeros(2, 16, 16), persistent=False)
        self.register_buffer("rows", torch.arange(16), persistent=False)
        self.grown = [(torch.zeros(0, 16, device="cuda"), torch.zeros(0, 16, device="cuda")) for _ in range(2)]

    def forward(self, token, position):
        h = self.embed(token)
        for layer in range(2):
            q, k, v = self.qkv[layer](self.norm[2 * layer](h)).split(16, -1)
            if self.cached == "static":
                self.keys[layer].index_copy_(0, position, k)
                self.values[layer].index_copy_(0, position, v)
                keys, values, mask = self.keys[layer], self.values[layer], (self.rows <= position).view(1, 16)
            else:
                keys, values = self.grown[layer]
                keys = torch.cat([keys, k])  # expect: CG208|CG205
                values = torch.cat([values, v])  # expect: CG208|CG205
                self.grown[layer] = (keys, values)
                mask = None
            attended = F.scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=mask)[0]
            h = h + self.out[layer](attended)
            h = h + F.silu(self.mlp[layer](self.norm[2 * layer + 1](h)))
        return h @ self.embed.weight.t()


def _factory(cached):
    torch.manual_seed(0)
    model = Decoder(cached).to("cuda").eval()

    @torch.no_grad()
    def step(token, position):
        logits = model(token, position)
        return logits, logits.argmax(-1)

    def inputs(i):
        return torch.tensor([i * 3 % 32], device="cuda"), torch.tensor([i], device="cuda")

    return step, inputs


def factory_ok_static_cache():
    return _factory("static")


def factory_bad_dynamic_cache():
    return _factory("grown")


def factory_ok_mixture_of_experts():
    torch.manual_seed(0)
    router = nn.Linear(8, 4).to("cuda")
    up = torch.randn(4, 8, 8, device="cuda")

    @torch.no_grad()
    def step(x):
        weights, chosen = router(x).softmax(-1).topk(2)
        y = torch.einsum("ti,tkij->tkj", x, up[chosen])
        return (y * weights.unsqueeze(-1)).sum(1)

    return step, lambda i: (torch.full((3, 8), 0.1 * i, device="cuda"),)


def factory_bad_expert_loop():
    torch.manual_seed(0)
    router = nn.Linear(8, 4).to("cuda")
    experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)).to("cuda")

    @torch.no_grad()
    def step(x):
        weights, chosen = router(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for index, expert in enumerate(experts):
            rows, slot = torch.where(chosen == index)  # expect: CG104
            y.index_add_(0, rows, expert(x[rows]) * weights[rows, slot, None])
        return y

    return step, lambda i: (torch.linspace(-1, 1 + i, 24, device="cuda").view(3, 8),)


def factory_ok_gru_by_hand():
    torch.manual_seed(0)
    cell = nn.Linear(16, 8).to("cuda")
    h = torch.zeros(8, device="cuda")

    @torch.no_grad()
    def step(x):
        gate = torch.sigmoid(cell(torch.cat([x, h])))
        h.copy_(gate * x + (1 - gate) * h)
        return h.clone()

    return step, lambda i: (torch.full((8,), 0.1 * i, device="cuda"),)


def factory_ok_convolution():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool1d(1)).to(
        "cuda"
    )

    @torch.no_grad()
    def step(x):
        return net(x)

    return step, lambda i: (torch.full((1, 4, 16), 0.1 * i, device="cuda"),)


def factory_ok_speculative_accept():
    def step(draft, target):
        agree = (draft == target).long().cumprod(0)
        count = agree.sum()
        return torch.where(torch.arange(4, device="cuda") <= count, target, -1), count

    return step, lambda i: (torch.tensor([1, 2, i, 4], device="cuda"), torch.tensor([1, 2, 3, 4], device="cuda"))
