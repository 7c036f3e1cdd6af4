"""Second held-out set: routers and experts, as serving engines and model files write them."""

import torch
import torch.nn.functional as F
from torch import nn

EXPERTS, TOP, WIDTH = 4, 2, 8


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.register_buffer("correction", torch.linspace(-0.1, 0.1, EXPERTS))

    def forward(self, x):
        scores = self.gate(x).sigmoid()
        chosen = (scores + self.correction).topk(TOP, dim=-1).indices
        weights = scores.gather(-1, chosen)
        return weights / weights.sum(-1, keepdim=True), chosen


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class VanillaExperts(nn.Module):
    """Loops over experts and takes each one's rows by a mask, as the fallback of several engines does."""

    def __init__(self):
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        weights, chosen = self.router(x)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mask = (chosen == index).any(-1)
            rows = x[mask]  # expect: CG104 @vanilla_experts
            weight = (weights * (chosen == index)).sum(-1)[mask]  # expect: CG104 optional @vanilla_experts
            out[mask] += expert(rows) * weight.unsqueeze(-1)  # expect: CG104 optional @vanilla_experts
        return out


class HitExperts(nn.Module):
    """Visits only the experts that were hit."""

    def __init__(self):
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        weights, chosen = self.router(x)
        final = torch.zeros_like(x)
        hit = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
        for index in hit.sum(dim=(-1, -2)).gt(0).nonzero():  # expect: CG104 @hit_experts, CG201 optional @hit_experts
            slot, token = torch.where(hit[index[0]])  # expect: CG104|CG101 optional @hit_experts
            current = self.experts[index[0]](x[token])  # expect: CG101|CG108 optional @hit_experts
            final.index_add_(0, token, current * weights[token, slot, None])
        return final


class GroupedExperts(nn.Module):
    """Sorts tokens by expert; sizes stay on the device."""

    def __init__(self):
        super().__init__()
        self.router = Router()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.1)

    def forward(self, x):
        weights, chosen = self.router(x)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        experts = flat[order]
        tokens = order // TOP
        product = torch.bmm(x[tokens].unsqueeze(1), self.weight[experts]).squeeze(1)
        out = torch.zeros_like(x)
        return out.index_add_(0, tokens, product * weights.flatten()[order].unsqueeze(-1))


def _inputs(i):
    generator = torch.Generator().manual_seed(i)
    return (torch.randn(6, WIDTH, generator=generator).to("cuda"),)


def _module(kind):
    torch.manual_seed(1)
    model = kind().to("cuda").eval()
    return torch.no_grad()(lambda x: model(x))


def factory_bad_vanilla_experts():  # hazard: 5
    return _module(VanillaExperts), _inputs


def factory_bad_hit_experts():  # hazard: 5
    return _module(HitExperts), _inputs


def factory_ok_grouped_experts():
    return _module(GroupedExperts), _inputs


def factory_bad_capacity_from_load():  # hazard: 1
    torch.manual_seed(1)
    router = Router().to("cuda")

    def dispatch(x, chosen):
        load = F.one_hot(chosen[:, 0], EXPERTS).sum(0)
        capacity = int(load.max() * 1.25) + 1  # expect: CG101
        buffer = x.new_zeros(EXPERTS, capacity, WIDTH)  # expect: CG202|CG208 optional
        rank = F.one_hot(chosen[:, 0], EXPERTS).cumsum(0).gather(1, chosen[:, :1]).squeeze(1) - 1
        buffer[chosen[:, 0], rank.clamp_max(capacity - 1)] = x  # expect: CG202 optional, CG208 optional
        return buffer.sum((0, 1))  # expect: CG208 optional

    @torch.no_grad()
    def step(x):
        _, chosen = router(x)
        return dispatch(x, chosen)

    return step, _inputs


def factory_bad_one_hot_width_unknown():  # hazard: 6
    def step(x):
        chosen = x.argmax(-1) % EXPERTS
        return F.one_hot(chosen).float().mean() * x.sum()  # expect: CG101|CG104|CG105, CG208 optional

    return step, _inputs


def factory_bad_local_expert_range():  # hazard: 1
    torch.manual_seed(1)
    router = Router().to("cuda")
    first, last = 1, 3

    @torch.no_grad()
    def step(x):
        weights, chosen = router(x)
        local = (chosen >= first) & (chosen < last)
        if not local.any():  # expect: CG108
            return torch.zeros_like(x)
        return x * (weights * local).sum(-1, keepdim=True)

    return step, _inputs


def factory_bad_aligned_blocks():  # hazard: 1
    """Sizes of each expert's rows, rounded up to the kernel's block, in a Python loop."""

    def align(counts, block):
        ends, total = [], 0
        for count in counts.tolist():  # expect: CG101
            total += -(-count // block) * block
            ends.append(total)
        return ends

    def step(x):
        chosen = x.argmax(-1) % EXPERTS
        counts = torch.zeros(EXPERTS, dtype=torch.long, device="cuda")
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        ends = align(counts, 2)
        return x.sum(0) * ends[-1]  # expect: CG202 optional

    return step, _inputs


def factory_bad_jitter_of_its_own():  # hazard: 21
    torch.manual_seed(1)
    router = Router().to("cuda")
    noise = torch.Generator(device="cuda")
    noise.manual_seed(7)

    @torch.no_grad()
    def step(x):
        jitter = torch.empty_like(x).uniform_(0.98, 1.02, generator=noise)  # expect: CG301
        weights, _ = router(x * jitter)
        return weights

    return step, _inputs


def factory_bad_tokens_per_expert_history():  # hazard: 14
    """Load statistics for balancing, kept as a new tensor each step."""

    class Balancer:
        load = torch.zeros(EXPERTS)

        def __init__(self):
            self.load = torch.zeros(EXPERTS, device="cuda")

        def update(self, chosen):
            hits = F.one_hot(chosen, EXPERTS).float().sum(0)
            self.load = self.load * 0.9 + hits * 0.1  # expect: CG205
            return self.load

    balancer = Balancer()

    def step(x):
        load = balancer.update(x.argmax(-1) % EXPERTS)
        return x.sum(0)[:EXPERTS] - load

    return step, _inputs


def factory_ok_group_limited_top_k():
    """DeepSeek's group-limited routing: masks and top-k of fixed sizes."""
    torch.manual_seed(1)
    gate = nn.Linear(WIDTH, 8, bias=False).to("cuda")

    @torch.no_grad()
    def step(x):
        scores = gate(x).softmax(-1)
        groups = scores.view(x.shape[0], 4, -1).amax(-1)
        best = groups.topk(2, dim=-1, sorted=False).indices
        mask = torch.zeros_like(groups).scatter_(1, best, 1.0)
        allowed = mask.unsqueeze(-1).expand(-1, -1, 2).reshape(x.shape[0], -1)
        weights, index = scores.masked_fill(allowed == 0, 0.0).topk(TOP, dim=-1)
        return weights * 2.5, index

    return step, _inputs


def factory_ok_one_hot_with_classes():
    def step(x):
        chosen = x.topk(TOP, dim=-1).indices % EXPERTS
        counts = F.one_hot(chosen, num_classes=EXPERTS).sum((0, 1))
        offsets = counts.cumsum(0) - counts
        return counts, offsets

    return step, _inputs


def factory_ok_all_experts_masked():
    torch.manual_seed(1)
    router, experts = Router().to("cuda"), nn.ModuleList(Expert() for _ in range(EXPERTS)).to("cuda")

    @torch.no_grad()
    def step(x):
        weights, chosen = router(x)
        dense = torch.zeros(x.shape[0], EXPERTS, device=x.device).scatter_(1, chosen, weights)
        return sum(expert(x) * dense[:, i : i + 1] for i, expert in enumerate(experts))

    return step, _inputs


def factory_ok_padded_slots():
    """Rows of each expert in slots of fixed capacity, without a host number."""
    capacity = 6

    def step(x):
        chosen = x.argmax(-1) % EXPERTS
        hot = F.one_hot(chosen, EXPERTS)
        rank = (hot.cumsum(0) * hot).sum(-1) - 1
        slots = torch.zeros(EXPERTS * capacity, WIDTH, device=x.device, dtype=x.dtype)
        slots.index_copy_(0, chosen * capacity + rank, x)
        return slots.view(EXPERTS, capacity, WIDTH).sum(1)

    return step, _inputs
