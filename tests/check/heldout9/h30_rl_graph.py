"""Reinforcement learning and graph networks."""
import functools
import random
from collections import deque
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

DEV = "cuda"


def rnd(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEV)


def net(sizes, seed):
    torch.manual_seed(seed)
    layers = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(DEV)


@dataclass
class Transition:
    obs: torch.Tensor
    action: torch.Tensor
    reward: torch.Tensor
    done: torch.Tensor


def transition(i, n=6, obs=8, actions=3):
    g = torch.Generator().manual_seed(900 + i)
    return (Transition(torch.randn(n, obs, generator=g).to(DEV), torch.randint(0, actions, (n,), generator=g).to(DEV),
                       torch.randn(n, generator=g).to(DEV), (torch.rand(n, generator=g) < 0.3).to(DEV)),)


class FrameStack:
    def __init__(self, num_stack, template):
        self.frames = deque([torch.zeros_like(template) for _ in range(num_stack)], maxlen=num_stack)

    def observe(self, frame):
        self.frames.append(frame * 1.0)  # expect: CG210|CG205 optional @frame_stack_deque
        return torch.stack(list(self.frames), dim=1).flatten(1)  # expect: CG205|CG206|CG210 @frame_stack_deque


def factory_bad_frame_stack_deque():  # hazard: 14
    stack = FrameStack(4, torch.zeros(5, 6, device=DEV))
    policy = net([24, 16, 3], 0)

    @torch.no_grad()
    def act(frame):
        logits = policy(stack.observe(frame))
        return logits.argmax(-1), logits

    return act, lambda i: (rnd(i, 5, 6),)


class RollingFrames(nn.Module):
    def __init__(self, num_stack, envs, dim):
        super().__init__()
        self.register_buffer("buf", torch.zeros(num_stack, envs, dim), persistent=False)

    def forward(self, frame, reset):
        self.buf.copy_(self.buf.roll(-1, dims=0) * (~reset)[None, :, None])
        self.buf[-1] = frame
        return self.buf.transpose(0, 1).flatten(1)


def factory_ok_frame_stack_rolled_buffer():  # hazard: 14
    frames = RollingFrames(4, 5, 6).to(DEV)
    policy = net([24, 16, 3], 1)

    @torch.no_grad()
    def act(frame, reset):
        logits = policy(frames(frame, reset))
        return logits.argmax(-1), logits

    return act, lambda i: (rnd(20 + i, 5, 6), (torch.arange(5) % 6 == i).to(DEV))


class ReplayMemory:
    def __init__(self, capacity, obs_dim):
        self.obs = rnd(7, capacity, obs_dim)
        self.reward = rnd(8, capacity)
        self.capacity = capacity
        self.rng = random.Random(9)

    def sample(self, batch_size):
        idx = self.rng.sample(range(self.capacity), batch_size)
        return self.obs[idx], self.reward[idx]  # expect: CG103 @replay_list_index


def factory_bad_replay_list_index():  # hazard: 4
    memory, value = ReplayMemory(32, 8), net([8, 16, 1], 2)
    optimizer = torch.optim.SGD(value.parameters(), lr=0.05)

    def update(t):
        obs, reward = memory.sample(12)
        optimizer.zero_grad()
        loss = F.mse_loss(value(obs).squeeze(-1), reward) + 0.1 * value(t.obs).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return update, transition


class RingReplay:
    """Write pointer on the host: nothing here ever waits for the device."""

    def __init__(self, capacity, obs_dim, n):
        self.obs = torch.zeros(capacity, obs_dim, device=DEV)
        self.reward = torch.zeros(capacity, device=DEV)
        self.capacity, self.n, self.pos, self.full = capacity, n, 0, False

    def add(self, t):
        end = self.pos + self.n
        self.obs[self.pos:end].copy_(t.obs)  # expect: CG202 @replay_host_write_pointer
        self.reward[self.pos:end].copy_(t.reward)  # expect: CG202 optional @replay_host_write_pointer
        self.full = self.full or end >= self.capacity
        self.pos = end % self.capacity


def factory_bad_replay_host_write_pointer():  # hazard: 11
    buffer, critic = RingReplay(24, 8, 6), net([8, 16, 1], 3)

    @torch.no_grad()
    def step(t):
        buffer.add(t)
        advantage = buffer.reward - critic(buffer.obs).squeeze(-1)
        return advantage, (advantage - advantage.mean()) / (advantage.std() + 1e-6)

    return step, transition


class DeviceReplay(nn.Module):
    def __init__(self, capacity, obs_dim):
        super().__init__()
        self.capacity = capacity
        self.register_buffer("obs", torch.zeros(capacity, obs_dim))
        self.register_buffer("reward", torch.zeros(capacity))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def add(self, t):
        slots = (self.count + torch.arange(t.obs.shape[0], device=t.obs.device)) % self.capacity
        self.obs.index_copy_(0, slots, t.obs)
        self.reward.index_copy_(0, slots, t.reward)
        self.count += t.obs.shape[0]

    def sample(self, n):
        filled = self.count.clamp(max=self.capacity)
        picks = (torch.arange(n, device=self.obs.device) * 7919 + self.count * 104729) % filled
        return self.obs[picks], self.reward.gather(0, picks)


def factory_ok_replay_device_ring():  # hazard: 11
    memory, critic = DeviceReplay(20, 8).to(DEV), net([8, 16, 1], 4)
    target = net([8, 16, 1], 4)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    updates = torch.zeros((), dtype=torch.long, device=DEV)

    def step(t):
        memory.add(t)
        obs, reward = memory.sample(10)
        with torch.no_grad():
            goal = reward + 0.9 * target(obs.flip(0)).squeeze(-1)
        optimizer.zero_grad()
        loss = F.smooth_l1_loss(critic(obs).squeeze(-1), goal)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            updates.add_(1)
            sync = (updates % 2 == 0).float()
            for p, q in zip(target.parameters(), critic.parameters()):
                p.lerp_(q, sync)
        return loss.detach()

    return step, transition


class RunningMeanStd:
    """baselines.common.running_mean_std on the device, except for the count."""

    def __init__(self, shape, epsilon=1e-4):
        self.mean, self.var, self.count = torch.zeros(shape, device=DEV), torch.ones(shape, device=DEV), epsilon

    def update(self, x):
        batch_mean, batch_var, batch_count = x.mean(0), x.var(0, unbiased=False), x.shape[0]
        delta, tot = batch_mean - self.mean, self.count + batch_count
        m2 = self.var * self.count + batch_var * batch_count + delta ** 2 * (self.count * batch_count / tot)  # expect: CG202 @obs_normaliser_count
        self.mean.add_(delta * (batch_count / tot))  # expect: CG202 optional @obs_normaliser_count
        self.var.copy_(m2 / tot)  # expect: CG202 optional @obs_normaliser_count
        self.count = tot

    def normalise(self, x):
        return ((x - self.mean) / (self.var + 1e-8).sqrt()).clamp(-5, 5)


def factory_bad_obs_normaliser_count():  # hazard: 11
    rms, policy = RunningMeanStd((8,)), net([8, 16, 3], 5)

    @torch.no_grad()
    def act(t):
        rms.update(t.obs)
        return F.softmax(policy(rms.normalise(t.obs)), -1)

    def inputs(i):
        (t,) = transition(i)
        t.obs = t.obs * (1 + i) + i
        return (t,)

    return act, inputs


class EpsilonGreedy(nn.Module):
    def __init__(self, q, start=1.0, end=0.05, decay=0.6):
        super().__init__()
        self.q, self.end, self.decay = q, end, decay
        self.register_buffer("eps", torch.tensor(start))

    @torch.no_grad()
    def forward(self, obs, u):
        greedy = self.q(obs).argmax(-1)
        explore = (u[:, 0] < self.eps)
        randomly = (u[:, 1] * 3).long()
        self.eps.mul_(self.decay).clamp_(min=self.end)
        return torch.where(explore, randomly, greedy), explore.float().mean()


class HostEpsilonGreedy:
    def __init__(self, q):
        self.q, self.steps_done = q, 0

    @property
    def epsilon(self):
        return 0.05 + 0.9 * 0.5 ** self.steps_done

    @torch.no_grad()
    def __call__(self, obs, u):
        threshold = self.epsilon
        self.steps_done += 1  # expect: CG210 optional @epsilon_property
        explore = u[:, 0] < threshold  # expect: CG202 @epsilon_property
        values = self.q(obs)
        return torch.where(explore, (u[:, 1] * 3).long(), values.argmax(-1)), explore.float().mean()


def rollout(i):
    return rnd(40 + i, 32, 8), torch.rand(32, 2, generator=torch.Generator().manual_seed(60 + i)).to(DEV)


def factory_ok_epsilon_buffer():  # hazard: 11
    return EpsilonGreedy(net([8, 16, 3], 6)).to(DEV), rollout


def factory_bad_epsilon_property():  # hazard: 11
    return HostEpsilonGreedy(net([8, 16, 3], 7)), rollout


class PPO:
    def __init__(self, epochs=3, target_kl=0.01, clip=0.2):
        self.policy = net([8, 16, 3], 8)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.5)
        self.epochs, self.target_kl, self.clip = epochs, target_kl, clip

    def logp(self, t):
        return F.log_softmax(self.policy(t.obs), -1).gather(1, t.action[:, None]).squeeze(1)

    def surrogate(self, t, old):
        logp = self.logp(t)
        ratio = (logp - old).exp()
        loss = -torch.min(ratio * t.reward, ratio.clamp(1 - self.clip, 1 + self.clip) * t.reward).mean()
        return loss, (old - logp).mean().detach()

    def descend(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


class SpinningUpPPO(PPO):
    def update(self, t):
        with torch.no_grad():
            old = self.logp(t)
        for _ in range(self.epochs):
            loss, kl = self.surrogate(t, old)
            if kl > 1.5 * self.target_kl:  # expect: CG108|CG101 @ppo_kl_break
                break
            self.descend(loss)
        return loss.detach(), kl


class MaskedPPO(PPO):
    """Instead of leaving the loop, the loss of the epochs after the limit is multiplied by zero."""

    def update(self, t):
        with torch.no_grad():
            old = self.logp(t)
        alive = torch.ones((), device=old.device)
        for _ in range(self.epochs):
            loss, kl = self.surrogate(t, old)
            alive = alive * (kl.abs() <= 1.5 * self.target_kl)
            self.descend(loss * alive)
        return loss.detach(), kl, alive


def factory_bad_ppo_kl_break():  # hazard: 9
    return SpinningUpPPO().update, transition


def factory_ok_ppo_kl_mask():  # hazard: 9
    return MaskedPPO().update, transition


class VectorPendulum:
    """Batched environment, reset one by one as gym's SyncVectorEnv does."""

    def __init__(self, n):
        self.state = rnd(10, n, 2)
        self.start = rnd(11, n, 2) * 0.1

    def step(self, torque):
        theta, omega = self.state.unbind(-1)
        omega = omega + 0.1 * (9.8 * theta.sin() + torque)
        theta = theta + 0.1 * omega
        self.state.copy_(torch.stack([theta, omega], -1))
        done = theta.abs() > 1.2
        reward = -(theta ** 2 + 0.1 * omega ** 2)
        for i, d in enumerate(done):
            if d:  # expect: CG108|CG101 @vector_env_reset_loop
                self.state[i] = self.start[i]
        return self.state.clone(), reward, done


def factory_bad_vector_env_reset_loop():  # hazard: 9
    env, policy = VectorPendulum(5), net([2, 16, 1], 9)

    @torch.no_grad()
    def step(kick):
        torque = policy(env.state).squeeze(-1) + kick
        return env.step(torque)

    return step, lambda i: (rnd(80 + i, 5),)


# --- graphs


def edges(i, nodes=10, count=24):
    g = torch.Generator().manual_seed(1000 + i)
    index = torch.randint(0, nodes, (2, count), generator=g)
    index[:, 0] = nodes - 1
    return index.to(DEV)


def maybe_num_nodes(index, num_nodes=None):
    return int(index.max()) + 1 if num_nodes is None else num_nodes  # expect: CG101 @gcn_num_nodes_from_index


def scatter(src, index, dim_size=None, reduce="sum"):
    dim_size = maybe_num_nodes(index, dim_size)
    out = src.new_zeros(dim_size, src.shape[-1]).index_add_(0, index, src)
    if reduce == "mean":
        count = src.new_zeros(dim_size).index_add_(0, index, torch.ones_like(src[:, 0]))
        out = out / count.clamp(min=1)[:, None]
    return out


class SAGEConv(nn.Module):
    def __init__(self, dim, known_size, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.lin_l, self.lin_r, self.known_size = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False), known_size

    def forward(self, x, edge_index):
        row, col = edge_index
        agg = scatter(x[row], col, x.shape[0] if self.known_size else None, reduce="mean")
        return F.relu(self.lin_l(agg) + self.lin_r(x))


def factory_bad_gcn_num_nodes_from_index():  # hazard: 1
    convs = nn.ModuleList(SAGEConv(8, k == 0, 20 + k) for k in range(2)).to(DEV)

    @torch.no_grad()
    def step(x, edge_index):
        for conv in convs:
            x = conv(x, edge_index)
        return x

    return step, lambda i: (rnd(100 + i, 10, 8), edges(i))


def factory_ok_gcn_sized_scatter():  # hazard: 1
    convs = nn.ModuleList(SAGEConv(8, True, 30 + k) for k in range(2)).to(DEV)
    optimizer = torch.optim.SGD(convs.parameters(), lr=0.1, momentum=0.9)

    def step(x, edge_index, y):
        h = x
        for conv in convs:
            h = conv(h, edge_index)
        loss = F.cross_entropy(h, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach(), "pred": h.detach()}

    return step, lambda i: (rnd(120 + i, 10, 8), edges(i), (torch.arange(10) * (i + 1) % 8).to(DEV))


class RadiusInteraction(nn.Module):
    def __init__(self, dim=8, cutoff=1.2, seed=40):
        super().__init__()
        torch.manual_seed(seed)
        self.cutoff = cutoff
        self.embed, self.filter = nn.Linear(3, dim), nn.Sequential(nn.Linear(6, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.register_buffer("centers", torch.linspace(0, cutoff, 6))

    def rbf(self, d):
        return torch.exp(-10 * (d[..., None] - self.centers) ** 2)


class SparseSchNet(RadiusInteraction):
    def radius_graph(self, pos):
        dist = torch.cdist(pos, pos)
        adj = (dist < self.cutoff) & ~torch.eye(len(pos), dtype=torch.bool, device=pos.device)
        return adj.nonzero(as_tuple=True)  # expect: CG104 @schnet_radius_nonzero

    @torch.no_grad()
    def forward(self, pos):
        i, j = self.radius_graph(pos)
        h = self.embed(pos)
        messages = h[j] * self.filter(self.rbf((pos[i] - pos[j]).norm(dim=-1)))
        return h.index_add(0, i, messages).sum(-1)


class DenseSchNet(RadiusInteraction):
    @torch.no_grad()
    def forward(self, pos):
        n = pos.shape[0]
        diff = pos[:, None] - pos[None]
        dist = (diff.pow(2).sum(-1) + 1e-9).sqrt()
        adj = (dist < self.cutoff).float() * (1 - torch.eye(n, device=pos.device))
        h = self.embed(pos)
        messages = h[None] * self.filter(self.rbf(dist)) * adj[..., None]
        return (h + messages.sum(1)).sum(-1), adj.sum()


def factory_bad_schnet_radius_nonzero():  # hazard: 5
    return SparseSchNet().to(DEV), lambda i: (rnd(140 + i, 9, 3),)


def factory_ok_schnet_dense_cutoff():  # hazard: 5
    return DenseSchNet(seed=41).to(DEV), lambda i: (rnd(160 + i, 9, 3),)


class CSRAttention:
    """Edge softmax over CSR rows: the number of edges is fixed, so the expansion's size is known."""

    def __init__(self, edges_total):
        self.q, self.k = net([8, 8], 50), net([8, 8], 51)
        self.edges_total = edges_total

    @torch.no_grad()
    def __call__(self, x, degree, col):
        row = torch.repeat_interleave(torch.arange(x.shape[0], device=x.device), degree, output_size=self.edges_total)
        score = (self.q(x)[row] * self.k(x)[col]).sum(-1) / 8 ** 0.5
        top = torch.full_like(x[:, 0], -1e9).scatter_reduce(0, row, score, "amax")
        e = (score - top[row]).exp()
        z = torch.zeros_like(x[:, 0]).index_add_(0, row, e)
        return torch.zeros_like(x).index_add_(0, row, (e / z[row])[:, None] * x[col])


def csr(i, nodes=8, total=20):
    g = torch.Generator().manual_seed(1100 + i)
    degree = 1 + torch.bincount(torch.randint(0, nodes, (total - nodes,), generator=g), minlength=nodes)
    return rnd(180 + i, nodes, 8), degree.to(DEV), torch.randint(0, nodes, (total,), generator=g).to(DEV)


def factory_ok_csr_output_size():  # hazard: 5
    return CSRAttention(20), csr


class UniquePooling(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(52)
        self.assign = nn.Linear(8, 4)

    @torch.no_grad()
    def forward(self, x):
        cluster = self.assign(x).argmax(-1) * 7
        _, compact = torch.unique(cluster, return_inverse=True)  # expect: CG104 @cluster_pool_unique
        pooled = x.new_zeros(4, 8).index_add_(0, compact, x)
        return pooled.sort(dim=0).values


def factory_bad_cluster_pool_unique():  # hazard: 5
    return UniquePooling().to(DEV), lambda i: (rnd(200 + i, 12, 8),)


def _wigner_table(order, angle):
    """Rotation of the real harmonics of one order about z."""
    c, s = torch.cos(torch.tensor(order * angle)), torch.sin(torch.tensor(order * angle))
    return torch.stack([torch.stack([c, -s]), torch.stack([s, c])])


@functools.lru_cache(maxsize=2)
def small_rotation_cache(order, angle):
    return _wigner_table(order, angle).to(DEV)  # expect: CG102 @equivariant_lru_cache_thrash


@functools.lru_cache(maxsize=None)
def rotation_cache(order, angle):
    return _wigner_table(order, angle).to(DEV)


class SteerableLayer:
    def __init__(self, table, orders, seed):
        self.table, self.orders = table, orders
        self.w = rnd(seed, len(orders), 2, 2)

    @torch.no_grad()
    def __call__(self, feats):
        out = []
        for k, m in enumerate(self.orders):
            r = self.table(m, 0.7)
            out.append(torch.tanh(feats[:, k] @ r.t() @ self.w[k]) @ r)
        return torch.stack(out, 1)


def factory_bad_equivariant_lru_cache_thrash():  # hazard: 3
    layer = SteerableLayer(small_rotation_cache, (1, 2, 3), 60)
    return layer, lambda i: (rnd(220 + i, 5, 3, 2),)


def factory_ok_equivariant_lru_cache_hit():  # hazard: 3
    layer = SteerableLayer(rotation_cache, (1, 2, 3), 61)
    return layer, lambda i: (rnd(240 + i, 5, 3, 2),)
