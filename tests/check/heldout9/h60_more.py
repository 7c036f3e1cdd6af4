"""Experts, memories, rays, hypernetworks, compiled helpers."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

DEV = "cuda"


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEV)


def build(make, seed):
    torch.manual_seed(seed)
    return make().to(DEV)


class SortedExperts(nn.Module):
    """Tokens sorted by expert, then cut into one piece for each."""

    def __init__(self, dim=8, n=3):
        super().__init__()
        self.gate = nn.Linear(dim, n)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(n))

    def dispatch(self, x, chosen):
        counts = F.one_hot(chosen, len(self.experts)).sum(0)
        order = chosen.argsort(stable=True)
        return x[order].split(counts.tolist()), order  # expect: CG101 @sorted_experts_tolist

    @torch.no_grad()
    def forward(self, x):
        pieces, order = self.dispatch(x, self.gate(x).argmax(-1))
        y = torch.cat([torch.tanh(e(p)) for e, p in zip(self.experts, pieces)])
        return torch.empty_like(y).index_copy_(0, order, y)


class DenseExperts(SortedExperts):
    """Each expert sees each token; the gate's one-hot weights select."""

    @torch.no_grad()
    def forward(self, x):
        weights = F.one_hot(self.gate(x).argmax(-1), len(self.experts)).to(x.dtype)
        y = torch.stack([torch.tanh(e(x)) for e in self.experts], 1)
        load = weights.mean(0)
        return (weights[..., None] * y).sum(1), (load * load).sum()


def factory_bad_sorted_experts_tolist():  # hazard: 2
    return build(SortedExperts, 0), lambda i: (draw(i, 10, 8),)


def factory_ok_dense_experts():  # hazard: 2
    return build(DenseExperts, 1), lambda i: (draw(20 + i, 10, 8),)


class SkipOnOverflow:
    """A hand-made loss scaler, as before torch.amp."""

    def __init__(self, params, scale=2.0 ** 127):
        self.params, self.scale = list(params), torch.full((), scale, device=DEV)

    def overflowed(self):
        total = sum(p.grad.abs().sum() for p in self.params)
        return torch.is_nonzero((~torch.isfinite(total)).any())  # expect: CG101|CG108 @overflow_is_nonzero

    @torch.no_grad()
    def step(self, lr):
        if self.overflowed():
            self.scale.mul_(0.5)
            return
        for p in self.params:
            p.sub_(lr * p.grad / self.scale)


class MaskOverflow(SkipOnOverflow):
    @torch.no_grad()
    def step(self, lr):
        finite = torch.stack([torch.isfinite(p.grad).all() for p in self.params]).all()
        self.scale.mul_(0.5 + 0.5 * finite)
        for p in self.params:
            g = p.grad / self.scale
            g[~torch.isfinite(g)] = 0.0
            p.sub_(lr * g * finite)


def scaled_training(kind, seed):
    net = build(lambda: nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2)), seed)
    scaler = kind(net.parameters())

    def step(x, y):
        for p in scaler.params:
            p.grad = None
        loss = F.mse_loss(net(x), y)
        (4.0 * loss * scaler.scale).backward()
        scaler.step(0.2)
        return loss.detach(), scaler.scale.clone()

    return step, lambda i: (draw(40 + i, 8, 6), draw(50 + i, 8, 2))


def factory_bad_overflow_is_nonzero():  # hazard: 1
    return scaled_training(SkipOnOverflow, 2)


def factory_ok_overflow_masked():  # hazard: 1
    return scaled_training(MaskOverflow, 3)


class OccupancyField(nn.Module):
    """Only the samples inside of occupied cells go through the network."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4))
        self.register_buffer("grid", (torch.rand(4, 4, 4) > 0.4))

    def occupied(self, pts):
        cell = ((pts.clamp(-1, 0.999) + 1) * 2).long()
        return self.grid[cell[..., 0], cell[..., 1], cell[..., 2]]

    @torch.no_grad()
    def forward(self, origin, direction):
        t = torch.linspace(0.1, 1.5, 6, device=origin.device)
        pts = origin[:, None] + direction[:, None] * t[:, None]
        occ = self.occupied(pts)
        raw = torch.zeros(*pts.shape[:2], 4, device=pts.device)
        raw[occ] = self.net(pts[occ])  # expect: CG104 @nerf_occupancy_mask
        alpha = 1 - torch.exp(-F.relu(raw[..., 3]) * 0.2)
        trans = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
        return ((alpha * trans)[..., None] * raw[..., :3].sigmoid()).sum(1)


def factory_bad_nerf_occupancy_mask():  # hazard: 5
    return build(OccupancyField, 4), lambda i: (0.3 * draw(60 + i, 5, 3), F.normalize(draw(70 + i, 5, 3), dim=-1))


class EpisodicMemory:
    def __init__(self, dim):
        self.keys, self.values = draw(80, 1, dim), draw(81, 1, dim)

    def write(self, k, v):
        self.keys = torch.cat([self.keys, k])  # expect: CG208|CG205 @episodic_memory_grows
        self.values = torch.cat([self.values, v])  # expect: CG208|CG205 optional @episodic_memory_grows

    def read(self, q):
        return F.softmax(q @ self.keys.t() / q.shape[-1] ** 0.5, -1) @ self.values  # expect: CG208|CG205 optional @episodic_memory_grows


def factory_bad_episodic_memory_grows():  # hazard: 17
    memory, proj = EpisodicMemory(8), build(lambda: nn.Linear(8, 24), 5)

    @torch.no_grad()
    def step(x):
        q, k, v = proj(x).chunk(3, -1)
        out = memory.read(q)
        memory.write(k, v)
        return out

    return step, lambda i: (draw(90 + i, 2, 8),)


class TokenDropper(nn.Module):
    """The least attended tokens are struck out before a second look."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    @torch.no_grad()
    def forward(self, x):
        received = (self.q(x) @ self.k(x).t()).softmax(-1).sum(0)
        drop = received.topk(3, largest=False).indices
        received[drop] = 0.0  # expect: CG103|CG102 @token_drop_index_scalar
        return (received / received.sum()) @ x


class TokenDropperMask(TokenDropper):
    @torch.no_grad()
    def forward(self, x):
        received = (self.q(x) @ self.k(x).t()).softmax(-1).sum(0)
        kth = received.topk(3, largest=False).values[-1]
        received[received <= kth] = 0.0
        return (received / received.sum()) @ x


def factory_bad_token_drop_index_scalar():  # hazard: 4
    return build(TokenDropper, 6), lambda i: (draw(100 + i, 9, 8),)


def factory_ok_token_drop_mask_scalar():  # hazard: 4
    return build(TokenDropperMask, 7), lambda i: (draw(120 + i, 9, 8),)


class HyperNetwork(nn.Module):
    """Weights of a small target network, made from the embedding of a task which is a tensor."""

    def __init__(self, tasks=4):
        super().__init__()
        object.__setattr__(self, "target", nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(DEV))
        self.sizes = {k: p.shape for k, p in self.target.named_parameters()}
        self.task = nn.Embedding(tasks, 5)
        self.out = nn.Linear(5, sum(s.numel() for s in self.sizes.values()))

    def weights(self, task):
        flat, at, made = self.out(self.task(task)), 0, {}
        for name, size in self.sizes.items():
            made[name] = flat[at:at + size.numel()].view(size)
            at += size.numel()
        return made

    def forward(self, x, task):
        return functional_call(self.target, self.weights(task), (x,))


class HyperList(nn.Module):
    """The same with a list of embeddings and the task as an int."""

    def __init__(self, tasks=4):
        super().__init__()
        self.embeddings = nn.ParameterList(torch.randn(5) for _ in range(tasks))
        self.out = nn.Linear(5, 4 * 2)

    def forward(self, x, task_id):
        code = self.embeddings[task_id]
        return x @ self.out(code).view(4, 2)  # expect: CG205|CG201|CG202 @hypernetwork_task_int


def factory_ok_hypernetwork_task_tensor():  # hazard: 14
    net = build(HyperNetwork, 8)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x, y, task):
        opt.zero_grad()
        loss = F.mse_loss(net(x, task), y)
        loss.backward()
        opt.step()
        return loss.detach()

    return step, lambda i: (draw(140 + i, 6, 4), draw(150 + i, 6, 2), torch.full((), i % 4).to(DEV))


def factory_bad_hypernetwork_task_int():  # hazard: 14
    net = build(HyperList, 9)
    return torch.no_grad()(lambda x, task: net(x, task)), lambda i: (draw(160 + i, 6, 4), i % 4)


@torch.compile(backend="eager", dynamic=False)
def fused_gate(x, w, b):
    h, g = F.linear(x, w, b).chunk(2, -1)
    return h * torch.sigmoid(g)


def factory_ok_compiled_helper():  # hazard: 27
    w, b, state = draw(180, 16, 8) * 0.3, draw(181, 16), torch.zeros(5, 8, device=DEV)

    @torch.no_grad()
    def step(x):
        for _ in range(2):
            state.copy_(0.5 * state + fused_gate(x + state, w, b))
        return state.clone()

    return step, lambda i: (draw(190 + i, 5, 8),)


class RotaryTable:
    """The table doubles when the host's position runs over its end."""

    def __init__(self, dim=8, length=4):
        self.freq = (1.0 / 100 ** (torch.arange(0, dim, 2) / dim)).to(DEV)
        self.grow(length)
        self.position = 0

    def grow(self, length):
        angle = torch.arange(length, device=DEV)[:, None] * self.freq
        self.cos, self.sin, self.length = angle.cos(), angle.sin(), length

    def __call__(self, x):
        end = self.position + x.shape[1]
        if end > self.length:  # expect: CG201 @rotary_table_host_position
            self.grow(2 * self.length)  # expect: CG201|CG205|CG208|CG202 optional @rotary_table_host_position
        c, s = self.cos[self.position:end], self.sin[self.position:end]  # expect: CG202|CG205 @rotary_table_host_position
        self.position = end
        a, b = x.chunk(2, -1)
        return torch.cat([a * c - b * s, a * s + b * c], -1)


def factory_bad_rotary_table_host_position():  # hazard: 11
    rotary, proj = RotaryTable(), build(lambda: nn.Linear(8, 8), 10)

    @torch.no_grad()
    def step(x):
        return rotary(proj(x))

    return step, lambda i: (draw(200 + i, 2, 3, 8),)
