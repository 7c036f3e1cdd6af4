"""Speculative decoding, LoRA slots, experts and quantised linears."""
import itertools
import math
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def seeded(seed, *shape, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to("cuda")


def ids(seed, *shape, high=32):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed)).to("cuda")


# --------------------------------------------------------------------------- verification of drafts
class RejectionSampler:
    def __init__(self, gamma):
        self.gamma = gamma

    def accepted(self, draft, target_logits):
        match = (target_logits[:, :-1].argmax(-1) == draft).int()
        return match.cumprod(1).sum(1)

    def truncate(self, draft, target_logits):
        n = self.accepted(draft, target_logits).min()
        kept = draft[:, :n]  # expect: CG101 @verify_min_accepted_slice
        bonus = target_logits[:, n].argmax(-1, keepdim=True)  # expect: CG101 @verify_min_accepted_slice optional
        out = torch.cat([kept, bonus], 1)
        return F.pad(out, (0, self.gamma + 1 - out.shape[1]), value=-1)

    def masked(self, draft, target_logits):
        n = self.accepted(draft, target_logits)[:, None]
        pos = torch.arange(self.gamma + 1, device=draft.device)[None]
        best = target_logits.argmax(-1)
        padded = F.pad(draft, (0, 1), value=-1)
        out = torch.where(pos < n, padded, best)
        return out.masked_fill(pos > n, -1)


class TargetModel:
    def __init__(self):
        self.emb = seeded(1, 32, 16)
        self.head = seeded(2, 16, 32)

    def __call__(self, toks):
        return torch.tanh(self.emb[toks].cumsum(1)) @ self.head


def make_verify(method):
    model, rs = TargetModel(), RejectionSampler(4)

    @torch.inference_mode()
    def step(prev, hint):
        draft = (hint @ model.head).argmax(-1)
        logits = model(torch.cat([prev, draft], 1))
        return getattr(rs, method)(draft, logits), logits.amax(-1)

    def inputs(i):
        prev = ids(100 + i, 3, 1)
        seq, hints = prev, []
        for j in range(4):  # hints that the target follows for some tokens
            h = torch.tanh(model.emb[seq].cumsum(1))[:, -1]
            hints.append(h if j < 1 + i % 3 else -h)
            seq = torch.cat([seq, (hints[-1] @ model.head).argmax(-1, keepdim=True)], 1)
        return prev, torch.stack(hints, 1)

    return step, inputs


def factory_bad_verify_min_accepted_slice():  # hazard: 1
    return make_verify("truncate")


def factory_ok_verify_masked():  # hazard: 1
    return make_verify("masked")


# --------------------------------------------------------------------------- tree attention
@dataclass(frozen=True)
class TokenTree:
    parents: tuple

    def ancestors(self):
        n = len(self.parents)
        m = torch.eye(n, dtype=torch.bool)
        for i, p in enumerate(self.parents):
            if p >= 0:
                m[i] |= m[p]
        return m

    def leaf_paths(self):
        leaves = [i for i in range(len(self.parents)) if i not in self.parents]
        depth = int(self.ancestors().sum(1).max())
        paths = []
        for leaf in leaves:
            path = []
            while leaf >= 0:
                path.append(leaf)
                leaf = self.parents[leaf]
            path.reverse()
            paths.append(path + [path[-1]] * (depth - len(path)))
        return torch.tensor(paths)


TREE = TokenTree((-1, 0, 0, 1, 1, 2, 3))


class TreeVerifier(nn.Module):
    def __init__(self, tree, dim=16):
        super().__init__()
        self.register_buffer("mask", tree.ancestors().to("cuda"))
        self.register_buffer("paths", tree.leaf_paths().to("cuda"))
        self.register_buffer("w", seeded(11, dim, dim, scale=0.5))
        self.register_buffer("head", seeded(12, dim, 32))

    def attend(self, x):
        s = (x @ self.w) @ x.T / math.sqrt(x.shape[-1])
        return s.masked_fill(~self.mask, float("-inf")).softmax(-1) @ x

    def scores(self, h, toks):
        best = (h @ self.head).argmax(-1) % 4
        parent_ok = best[self.paths[:, :-1]] == toks[self.paths[:, 1:]] % 4
        return parent_ok.int().cumprod(1).sum(1)

    def select(self, h, n):
        return h.index_select(0, self.paths[n.argmax().view(1)][0])

    def forward(self, x, toks):
        h = self.attend(x)
        n = self.scores(h, toks)
        return self.select(h, n), n


class RaggedTreeVerifier(TreeVerifier):
    def select(self, h, n):
        winners = torch.nonzero(n == n.max()).flatten()  # expect: CG104 @tree_winners_nonzero
        return h.index_select(0, self.paths[winners[0]])  # expect: CG101 @tree_winners_nonzero optional


def tree_inputs(i):
    return seeded(200 + i, 7, 16), ids(220 + i, 7)


def factory_bad_tree_winners_nonzero():  # hazard: 5
    return RaggedTreeVerifier(TREE), tree_inputs


def factory_ok_tree_static_paths():  # hazard: 5
    return TreeVerifier(TREE), tree_inputs


# --------------------------------------------------------------------------- how many tokens to draft
class SpecController:
    """Lowers the number of drafted tokens while the moving acceptance is poor."""

    def __init__(self, start=4, window=3):
        self.k = start
        self.history = deque(maxlen=window)

    def observe(self, rate):
        self.history.append(rate)
        if len(self.history) == self.history.maxlen and sum(self.history) / len(self.history) < 0.6:
            self.k = max(1, self.k - 1)
            self.history.clear()


class EagleDrafter:
    def __init__(self, controller, dim=16):
        self.ctl, self.w = controller, seeded(21, dim, dim, scale=0.4)

    def propose(self, hidden):
        h, drafts = hidden, []
        for _ in range(self.ctl.k):  # expect: CG201 @adaptive_draft_length
            h = torch.tanh(h @ self.w)  # expect: CG201 @adaptive_draft_length optional
            drafts.append(h)
        return drafts


def factory_bad_adaptive_draft_length():  # hazard: 10
    drafter = EagleDrafter(SpecController())
    rates = itertools.cycle([0.5, 0.4, 0.7])

    @torch.no_grad()
    def step(hidden):
        drafts = drafter.propose(hidden)
        pooled = torch.stack(drafts).mean(0)  # expect: CG201|CG208 optional
        drafter.ctl.observe(next(rates))
        return pooled, drafts[-1]

    return step, lambda i: (seeded(300 + i, 4, 16),)


# --------------------------------------------------------------------------- LoRA
class LoRAAdapter:
    def __init__(self, seed, dim, rank):
        self.a, self.b = seeded(seed, dim, rank, scale=0.4), seeded(seed + 1, rank, dim, scale=0.4)


class LoRALinear(nn.Linear):
    adapter = None

    def forward(self, x):
        y = super().forward(x)
        if self.adapter is not None:
            y = y + (x @ self.adapter.a) @ self.adapter.b  # expect: CG205|CG201 @lora_active_adapter
        return y


class LoRAManager:
    def __init__(self, module, adapters):
        self.module, self.adapters = module, adapters
        self.order = itertools.cycle(list(adapters))

    def activate_next(self):
        name = next(self.order)
        for m in self.module.modules():
            if isinstance(m, LoRALinear):
                m.adapter = self.adapters[name]


def build_lora_mlp():
    torch.manual_seed(5)
    return nn.Sequential(LoRALinear(16, 16), nn.GELU(), LoRALinear(16, 16)).to("cuda").requires_grad_(False)


def factory_bad_lora_active_adapter():  # hazard: 14
    mlp = build_lora_mlp()
    manager = LoRAManager(mlp, {n: LoRAAdapter(40 + 2 * i, 16, 4) for i, n in enumerate(("sql", "chat", "code"))})

    def step(x):
        manager.activate_next()
        return mlp(x)

    return step, lambda i: (seeded(400 + i, 3, 16),)


class PunicaLinear(nn.Module):
    """Adapters stacked by slot, chosen by a token's slot number; slot 0 is no adapter."""

    def __init__(self, slots, dim, rank, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(dim, dim).requires_grad_(False)
        self.register_buffer("a", seeded(seed, slots, dim, rank, scale=0.4).cpu())
        self.register_buffer("b", seeded(seed + 1, slots, rank, dim, scale=0.4).cpu())
        with torch.no_grad():
            self.b[0].zero_()

    def forward(self, x, slots):
        low = torch.einsum("td,tdr->tr", x, self.a[slots])
        return self.base(x) + torch.einsum("tr,trd->td", low, self.b[slots])


def factory_ok_lora_slots():  # hazard: 14
    layers = nn.ModuleList([PunicaLinear(4, 16, 4, 51), PunicaLinear(4, 16, 4, 53)]).to("cuda")

    def step(x, request_slots, token_to_request):
        slots = request_slots.index_select(0, token_to_request)
        for layer in layers:
            x = F.gelu(layer(x, slots))
        return x

    def inputs(i):
        return seeded(410 + i, 6, 16), ids(430 + i, 3, high=4), ids(450 + i, 6, high=3)

    return step, inputs


# --------------------------------------------------------------------------- experts
class TopKRouter(nn.Module):
    def __init__(self, dim, experts, k, seed):
        super().__init__()
        self.register_buffer("gate", seeded(seed, dim, experts))
        self.k = k

    def forward(self, x):
        w, sel = (x @ self.gate).softmax(-1).topk(self.k, -1)
        return w / w.sum(-1, keepdim=True), sel


class Experts(nn.Module):
    def __init__(self, e, dim, inner, seed):
        super().__init__()
        self.register_buffer("up", seeded(seed, e, dim, inner, scale=0.3))
        self.register_buffer("down", seeded(seed + 1, e, inner, dim, scale=0.3))

    def one(self, e, x):
        return F.silu(x @ self.up[e]) @ self.down[e]

    def __len__(self):
        return self.up.shape[0]


class LoopMoE(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.router, self.experts = TopKRouter(16, 4, 2, seed), Experts(4, 16, 24, seed + 1)

    def forward(self, x):
        w, sel = self.router(x)
        out = torch.zeros_like(x)
        for e in range(len(self.experts)):
            tok, slot = torch.where(sel == e)  # expect: CG104 @moe_expert_where
            out.index_add_(0, tok, self.experts.one(e, x[tok]) * w[tok, slot, None])
        return out


class DenseMoE(LoopMoE):
    def forward(self, x):
        w, sel = self.router(x)
        dense = torch.zeros(x.shape[0], len(self.experts), device=x.device).scatter_(1, sel, w)
        h = F.silu(torch.einsum("td,edi->eti", x, self.experts.up))
        return torch.einsum("eti,eid,te->td", h, self.experts.down, dense)


class OneHotCapacityMoE(LoopMoE):
    """Tokens by rank of arrival in a fixed capacity; the one-hot takes its width from the data."""

    capacity = 6

    def forward(self, x):
        w, sel = self.router(x)
        hot = F.one_hot(sel.flatten())  # expect: CG101|CG104 @moe_one_hot_width
        rank = (hot.cumsum(0) - hot).gather(1, sel.flatten()[:, None])[:, 0]
        return self._dispatch(x, w, sel, rank)

    def _dispatch(self, x, w, sel, rank):
        e = len(self.experts)
        flat, keep = sel.flatten(), rank < self.capacity
        src = x.repeat_interleave(sel.shape[1], 0)
        where = torch.where(keep, flat * self.capacity + rank, e * self.capacity)
        buf = x.new_zeros(e * self.capacity + 1, x.shape[1]).index_copy(0, where, src)
        h = F.silu(torch.bmm(buf[:-1].view(e, self.capacity, -1), self.experts.up))
        y = torch.cat([torch.bmm(h, self.experts.down).flatten(0, 1), x.new_zeros(1, x.shape[1])])
        return (y[where].view(*sel.shape, -1) * w[..., None]).sum(1)


class FixedCapacityMoE(OneHotCapacityMoE):
    def forward(self, x):
        w, sel = self.router(x)
        hot = F.one_hot(sel.flatten(), len(self.experts))
        rank = (hot.cumsum(0) - hot).gather(1, sel.flatten()[:, None])[:, 0]
        return self._dispatch(x, w, sel, rank)


def moe_inputs(base):
    return lambda i: (seeded(base + i, 8, 16),)


def factory_bad_moe_expert_where():  # hazard: 5
    return torch.no_grad()(LoopMoE(61)), moe_inputs(500)


def factory_ok_moe_dense_weights():  # hazard: 5
    return torch.no_grad()(DenseMoE(61)), moe_inputs(510)


def factory_bad_moe_one_hot_width():  # hazard: 1
    return OneHotCapacityMoE(64), moe_inputs(520)


def factory_ok_moe_fixed_capacity():  # hazard: 17
    return FixedCapacityMoE(64), moe_inputs(530)


class AllToAllDispatcher:
    """Expert parallelism over a fake group: the split sizes are host lists, as all_to_all_single wants."""

    def __init__(self, ranks, experts_per_rank):
        self.ranks, self.per = ranks, experts_per_rank

    def split_sizes(self, sel):
        dest = sel // self.per
        counts = torch.zeros(self.ranks, dtype=torch.int64, device=sel.device)
        counts.scatter_add_(0, dest, torch.ones_like(dest))
        return counts, dest

    def dispatch(self, x, sel):
        counts, dest = self.split_sizes(sel)
        order = dest.argsort(stable=True)
        sizes = counts.cpu()  # expect: CG101 @ep_split_sizes
        return x[order].split(sizes.tolist()), order

    def combine(self, parts, order):
        out = torch.cat(parts)
        return torch.empty_like(out).index_copy_(0, order, out)


def factory_bad_ep_split_sizes():  # hazard: 2
    router, disp = TopKRouter(16, 4, 1, 71), AllToAllDispatcher(2, 2)
    ws = [seeded(72 + r, 16, 16, scale=0.3) for r in range(2)]

    def step(x):
        w, sel = router(x)
        parts, order = disp.dispatch(x, sel[:, 0])
        return disp.combine([p @ wr for p, wr in zip(parts, ws)], order)

    return step, moe_inputs(540)


# --------------------------------------------------------------------------- quantised linears
FP8_MAX = 448.0


class Fp8Linear(nn.Module):
    def __init__(self, dim, seed):
        super().__init__()
        w = seeded(seed, dim, dim, scale=0.3)
        self.register_buffer("w_scale", w.abs().amax() / FP8_MAX)
        self.register_buffer("w", (w / self.w_scale).to(torch.float8_e4m3fn))

    def quant(self, x):
        raise NotImplementedError

    def forward(self, x):
        q, s = self.quant(x)
        return (q.float() @ self.w.float().t()) * (self.w_scale * s)


class PerTensorDynamic(Fp8Linear):
    def quant(self, x):
        scale = max(x.abs().max() / FP8_MAX, 1e-6)  # expect: CG101|CG108 @fp8_python_max_scale
        return (x / scale).to(torch.float8_e4m3fn), scale


class PerTokenDynamic(Fp8Linear):
    def quant(self, x):
        scale = (x.abs().amax(-1, keepdim=True) / FP8_MAX).clamp_min(1e-6)
        return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def factory_bad_fp8_python_max_scale():  # hazard: 1
    net = nn.Sequential(PerTensorDynamic(16, 81), nn.ReLU(), PerTensorDynamic(16, 82))
    return net, lambda i: (seeded(600 + i, 4, 16, scale=1 + i),)


def factory_ok_fp8_per_token():  # hazard: 1
    net = nn.Sequential(PerTokenDynamic(16, 83), nn.ReLU(), PerTokenDynamic(16, 84))
    return net, lambda i: (seeded(610 + i, 4, 16, scale=1 + i),)


def unpack_int4(packed, device):
    """Eight nibbles of an int32 word, lowest first."""
    shifts = torch.tensor([0, 4, 8, 12, 16, 20, 24, 28], device=device)  # expect: CG102 @int4_unpack_shifts
    return ((packed[..., None] >> shifts) & 0xF).flatten(-2)


def unpack_int4_arange(packed, device):
    shifts = torch.arange(0, 32, 4, device=device)
    return ((packed[..., None] >> shifts) & 0xF).flatten(-2)


class GPTQLinear(nn.Module):
    def __init__(self, inp, out, group, seed, unpack):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        nib = torch.randint(0, 16, (out, inp // 8, 8), generator=g)
        self.register_buffer("qweight", (nib << torch.arange(0, 32, 4)).sum(-1).to("cuda"))
        self.register_buffer("scales", (torch.rand(out, inp // group, generator=g) * 0.05 + 0.01).to("cuda"))
        self.group, self.unpack = group, unpack

    def dequantize(self):
        w = self.unpack(self.qweight, self.qweight.device).float() - 8.0
        return w * self.scales.repeat_interleave(self.group, 1)

    def forward(self, x):
        return F.linear(x, self.dequantize())


def factory_bad_int4_unpack_shifts():  # hazard: 3
    return GPTQLinear(32, 16, 16, 91, unpack_int4), lambda i: (seeded(700 + i, 3, 32),)


def factory_ok_int4_unpack_shifts():  # hazard: 3
    return GPTQLinear(32, 16, 16, 91, unpack_int4_arange), lambda i: (seeded(710 + i, 3, 32),)


# --------------------------------------------------------------------------- scales of the KV cache
class KVScaleAttention:
    def __init__(self, calibration_steps):
        self.cfg = SimpleNamespace(calibrate=calibration_steps)
        self.k_scale = torch.ones((), device="cuda")
        self.cache = torch.zeros(8, 2, 16, dtype=torch.int8, device="cuda")
        self.pos = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.seen = 0

    @property
    def calculate_kv_scales(self):
        return self.seen < self.cfg.calibrate

    def maybe_calibrate(self, k):
        if self.calculate_kv_scales:  # expect: CG201 @kv_scale_calibration
            torch.maximum(self.k_scale, k.abs().amax() / 64, out=self.k_scale)  # expect: CG201 @kv_scale_calibration optional
            self.seen += 1

    @torch.inference_mode()
    def __call__(self, k):
        self.maybe_calibrate(k)
        q = (k / self.k_scale * 8).round().clamp(-127, 127).to(torch.int8)
        self.cache.index_copy_(0, self.pos, q[None])
        self.pos.add_(1)
        return self.cache.float().mean(0) * self.k_scale / 8, self.k_scale.clone()


def kv_inputs(base):
    return lambda i: (seeded(base + i, 2, 16, scale=40.0 * (i + 1)),)


def factory_bad_kv_scale_calibration():  # hazard: 10
    return KVScaleAttention(calibration_steps=3), kv_inputs(800)


class OnceCalibrated:
    """Scales are taken from the first batch only, which is the one that warms up."""

    def __init__(self):
        self.calibrated = False
        self.k_scale = torch.ones((), device="cuda")
        self.v_scale = torch.ones((), device="cuda")

    def __call__(self, k, v):
        if not self.calibrated:
            self.k_scale.copy_(k.abs().amax() / 100)
            self.v_scale.copy_(v.abs().amax() / 100)
            self.calibrated = True
        qk = (k / self.k_scale).round().clamp(-127, 127)
        qv = (v / self.v_scale).round().clamp(-127, 127)
        return qk * self.k_scale, qv * self.v_scale


def factory_ok_kv_scale_first_batch():  # hazard: 10
    layer = OnceCalibrated()
    return layer, lambda i: (seeded(820 + i, 2, 16, scale=3.0), seeded(840 + i, 2, 16))
