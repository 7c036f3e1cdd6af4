"""Vision, meta learning, hooks, streams, timers, host tricks."""
import contextlib
import itertools
import math
import random
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.nn.utils.parametrize as parametrize
from torch.func import functional_call, grad, vmap

DEV = "cuda"


def tn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEV)


def seeded(make, seed):
    torch.manual_seed(seed)
    return make().to(DEV)


def boxes(i, n=10):
    g = torch.Generator().manual_seed(700 + i)
    xy = torch.rand(n, 2, generator=g) * 4
    wh = torch.rand(n, 2, generator=g) * 3 + 1
    return torch.cat([xy, xy + wh], 1).to(DEV), torch.rand(n, generator=g).to(DEV)


def iou_matrix(a, b):
    lt, rb = torch.maximum(a[:, None, :2], b[None, :, :2]), torch.minimum(a[:, None, 2:], b[None, :, 2:])
    inter = (rb - lt).clamp(min=0).prod(-1)
    area = lambda t: (t[:, 2:] - t[:, :2]).prod(-1)
    return inter / (area(a)[:, None] + area(b)[None] - inter)


def py_cpu_nms(dets, scores, thresh):
    order, keep = scores.argsort(descending=True), []
    while order.numel() > 0:
        i = order[0]
        keep.append(i)
        overlap = iou_matrix(dets[i][None], dets[order[1:]])[0]  # expect: CG101|CG103|CG108 @greedy_nms
        order = order[1:][overlap <= thresh]  # expect: CG104 @greedy_nms
    return torch.stack(keep)


def factory_bad_greedy_nms():  # hazard: 5
    def postprocess(dets, scores):
        keep = py_cpu_nms(dets, scores, 0.3)
        out = torch.zeros_like(dets)
        out[: keep.shape[0]] = dets[keep]
        return out

    return postprocess, boxes


class FastNMS:
    """The same greedy rule over a fixed count of candidates, by a mask."""

    def __init__(self, count, thresh):
        self.count, self.thresh = count, thresh
        self.upper = torch.triu(torch.ones(count, count, dtype=torch.bool), diagonal=1).to(DEV)

    def __call__(self, dets, scores):
        scores, order = scores.topk(self.count)
        dets = dets[order]
        clash = (iou_matrix(dets, dets) > self.thresh) & self.upper
        keep = torch.ones(self.count, dtype=torch.bool, device=dets.device)
        for k in range(self.count):
            keep = keep & ~(clash[k] & keep[k])
        return dets * keep[:, None], scores.masked_fill(~keep, 0.0), keep.sum()


def factory_ok_masked_nms():  # hazard: 5
    return FastNMS(8, 0.3), boxes


class SpatialTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.loc = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Tanh())

    def theta(self, p):
        raise NotImplementedError

    @torch.no_grad()
    def forward(self, img):
        grid = F.affine_grid(self.theta(self.loc(img)), img.shape, align_corners=False)
        return F.grid_sample(img, grid, align_corners=False, padding_mode="border")


class StackedTheta(SpatialTransformer):
    def theta(self, p):
        c, s = torch.cos(p[:, 0]), torch.sin(p[:, 0])
        return torch.stack([torch.stack([c, -s, 0.2 * p[:, 1]], -1), torch.stack([s, c, 0.2 * p[:, 2]], -1)], 1)


class RotationJitter(SpatialTransformer):
    """A fixed set of test-time rotations, written to the matrix one number at a time."""

    angles = (0.1, -0.2)

    def theta(self, p):
        theta = torch.zeros(p.shape[0], 2, 3, device=p.device)
        for b in range(p.shape[0]):
            a = self.angles[b % len(self.angles)]
            theta[b, 0, 0] = math.cos(a)  # expect: CG103|CG102 @theta_scalar_writes
            theta[b, 0, 1] = -math.sin(a)  # expect: CG103|CG102 optional @theta_scalar_writes
            theta[b, 1, :2] = p[b, :2].flip(0)
        return theta


def factory_bad_theta_scalar_writes():  # hazard: 4
    return seeded(RotationJitter, 1), lambda i: (tn(i, 3, 1, 8, 8),)


def factory_ok_theta_stacked():  # hazard: 4
    return seeded(StackedTheta, 2), lambda i: (tn(20 + i, 3, 1, 8, 8),)


class MultiScale:
    """YOLO: another resolution each few batches."""

    sizes = (8, 12, 16)

    def __init__(self, every=2):
        self.batch, self.every, self.rng = 0, every, random.Random(1)
        self.size = 8

    def __call__(self, img):
        if self.batch % self.every == 0:
            self.size = self.sizes[(self.batch // self.every) % 3]
        self.batch += 1  # expect: CG210 optional @multi_scale_training
        return F.interpolate(img, size=(self.size, self.size), mode="bilinear", align_corners=False)  # expect: CG208|CG202 @multi_scale_training


def factory_bad_multi_scale_training():  # hazard: 17
    conv = seeded(lambda: nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)), 3)
    opt, scale = torch.optim.SGD(conv.parameters(), lr=0.3), MultiScale()

    def step(img, y):
        opt.zero_grad()
        loss = F.mse_loss(conv(scale(img)), y)
        loss.backward()
        opt.step()
        return loss.detach()

    return step, lambda i: (tn(40 + i, 4, 1, 8, 8), tn(60 + i, 4, 3))


class AnchorGenerator(nn.Module):
    def __init__(self, sizes=(2.0, 4.0), ratios=(0.5, 1.0, 2.0)):
        super().__init__()
        s, r = torch.tensor(sizes), torch.tensor(ratios).sqrt()
        w, h = (s[:, None] / r).flatten(), (s[:, None] * r).flatten()
        self.register_buffer("cell", torch.stack([-w, -h, w, h], 1) / 2)
        self._cache = {}

    def grid(self, h, w, stride):
        key = (h, w, stride, str(self.cell.device))
        if key not in self._cache:
            ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
            shifts = torch.stack([xs, ys, xs, ys], -1).reshape(-1, 1, 4).float() * stride
            self._cache[key] = (shifts.to(self.cell.device) + self.cell).reshape(-1, 4)
        return self._cache[key]

    def forward(self, feature, stride):
        return self.grid(feature.shape[-2], feature.shape[-1], stride)


class Level(NamedTuple):
    boxes: torch.Tensor
    scores: torch.Tensor


def factory_ok_anchor_cache():  # hazard: 3
    anchors, head = AnchorGenerator().to(DEV), seeded(lambda: nn.Conv2d(4, 6 * 5, 1), 4)

    @torch.no_grad()
    def step(pyramid):
        out = []
        for stride, feature in zip((4, 8), pyramid):
            pred = head(feature).permute(0, 2, 3, 1).reshape(feature.shape[0], -1, 5)
            a = anchors(feature, stride)
            center, wh = (a[:, :2] + a[:, 2:]) / 2, a[:, 2:] - a[:, :2]
            score, top = pred[..., 4].topk(5, dim=1)
            decoded = torch.cat([center + pred[..., :2] * wh, wh * pred[..., 2:4].clamp(max=2).exp()], -1)
            out.append(Level(decoded.gather(1, top[..., None].expand(-1, -1, 4)), score.sigmoid()))
        return tuple(out)

    return step, lambda i: ([tn(80 + i, 2, 4, 4, 4), tn(90 + i, 2, 4, 2, 2)],)


class ShiftedBlock(nn.Module):
    """The class counts its calls in order to know whether this one is shifted. Three blocks: the parity goes on turning."""

    calls = 0

    def __init__(self, dim):
        super().__init__()
        self.mix = nn.Linear(4 * dim, 4 * dim)

    def forward(self, x):
        shift = 2 if ShiftedBlock.calls % 2 else 0
        ShiftedBlock.calls += 1  # expect: CG210 optional @swin_class_counter
        x = torch.roll(x, -shift, dims=1)  # expect: CG202 @swin_class_counter
        b, n, d = x.shape
        x = x + torch.tanh(self.mix(x.reshape(b, n // 4, 4 * d))).reshape(b, n, d)
        return torch.roll(x, shift, dims=1)  # expect: CG202 optional @swin_class_counter


def factory_bad_swin_class_counter():  # hazard: 11
    ShiftedBlock.calls = 0
    net = seeded(lambda: nn.Sequential(*(ShiftedBlock(4) for _ in range(3))), 5)
    return torch.no_grad()(lambda x: net(x)), lambda i: (tn(100 + i, 2, 8, 4),)


class CountedBlock(nn.Module):
    def __init__(self, dim, owner):
        super().__init__()
        self.owner = [owner]
        self.mix = nn.Linear(4 * dim, 4 * dim)

    def forward(self, x):
        depth = self.owner[0].depth
        self.owner[0].depth += 1
        shift = (depth % 2) * 2
        b, n, d = x.shape
        y = torch.tanh(self.mix(x.roll(-shift, 1).reshape(b, n // 4, 4 * d))).reshape(b, n, d)
        return x + y.roll(shift, 1) / (depth + 1)


class CountedTower(nn.Module):
    def __init__(self, dim=4, n=3):
        super().__init__()
        self.depth = 0
        self.blocks = nn.ModuleList(CountedBlock(dim, self) for _ in range(n))

    @contextlib.contextmanager
    def fresh_depth(self):
        saved, self.depth = self.depth, 0
        try:
            yield
        finally:
            self.depth = saved

    @torch.no_grad()
    def forward(self, x):
        with self.fresh_depth():
            for block in self.blocks:
                x = block(x)
        return x


def factory_ok_depth_counter_restored():  # hazard: 10
    return seeded(CountedTower, 6), lambda i: (tn(120 + i, 2, 8, 4),)


class PromptBank:
    def __init__(self, n):
        self.turn = itertools.cycle([tn(140 + k, 4) for k in range(n)])

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.turn)


def factory_bad_prompt_cycle():  # hazard: 14
    bank, head = PromptBank(3), seeded(lambda: nn.Linear(8, 3), 7)

    @torch.no_grad()
    def step(x):
        prompt = next(bank)
        return head(torch.cat([x, prompt.expand(x.shape[0], -1)], -1))  # expect: CG205|CG201|CG202

    return step, lambda i: (tn(150 + i, 5, 4),)


class CumulativeNormNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 3)
        self.bn = nn.BatchNorm1d(12, momentum=None)

    def forward(self, x):
        h = self.bn(self.fc1(x))  # expect: CG101 @batchnorm_cumulative_average
        return self.fc2(F.relu(h))


def factory_bad_batchnorm_cumulative_average():  # hazard: 1
    net = seeded(CumulativeNormNet, 8)

    @torch.no_grad()
    def recalibrate(x):
        net.train()
        out = net(x)
        return out, net.bn.running_mean.clone()

    return recalibrate, lambda i: (tn(160 + i, 16, 8) + i,)


class AlternatingTrainer:
    """Batch statistics on one batch, running ones on the next (as a part of SWA's update_bn)."""

    def __init__(self):
        self.net = seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=0.3), nn.ReLU(), nn.Linear(16, 2)), 9)
        self.phase = itertools.cycle(("fit", "fit", "eval"))

    @torch.no_grad()
    def step(self, x):
        self.net.train(next(self.phase) == "fit")  # expect: CG311|CG201|CG202 optional @train_eval_flip
        return self.net(x)  # expect: CG311|CG201|CG202 @train_eval_flip


def factory_bad_train_eval_flip():  # hazard: 31
    return AlternatingTrainer().step, lambda i: (tn(180 + i, 16, 8) * (1 + i),)


class GumbelRouter(nn.Module):
    """`tau` is a property which anneals as it is read."""

    def __init__(self):
        super().__init__()
        self.gate, self._tau = nn.Linear(8, 4), 4.0
        self.experts = nn.Parameter(torch.randn(4, 8, 8) * 0.3)

    @property
    def tau(self):
        self._tau = max(0.3, self._tau * 0.6)
        return self._tau

    def forward(self, x):
        weights = F.softmax(self.gate(x) / self.tau, -1)  # expect: CG202 @property_temperature
        return torch.einsum("be,bd,edk->bk", weights, x, self.experts), weights


def factory_bad_property_temperature():  # hazard: 11
    router = seeded(GumbelRouter, 10)
    return torch.no_grad()(lambda x: router(x)), lambda i: (tn(200 + i, 6, 8),)


class Sparsify(nn.Module):
    """Pruning parametrization. The cubic schedule of Zhu & Gupta is driven by a host step count."""

    def __init__(self, final=0.8, total=6):
        super().__init__()
        self.final, self.total, self.t = final, total, 0

    def forward(self, w):
        k = max(1, int(w.numel() * (1 - self.final * (1 - (1 - min(self.t, self.total) / self.total) ** 3))))
        kth = w.detach().abs().flatten().topk(k).values[-1]  # expect: CG202|CG208 @pruning_schedule
        return w * (w.detach().abs() >= kth)


def factory_bad_pruning_schedule():  # hazard: 11
    layer = seeded(lambda: nn.Linear(8, 8), 11)
    sparsify = Sparsify()
    parametrize.register_parametrization(layer, "weight", sparsify)
    opt = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(x, y):
        opt.zero_grad()
        loss = F.mse_loss(layer(x), y)
        loss.backward()
        opt.step()
        sparsify.t += 1  # expect: CG210 optional
        return loss.detach()

    return step, lambda i: (tn(220 + i, 12, 8), tn(230 + i, 12, 8))


def factory_ok_spectral_norm_critic():  # hazard: 14
    sn = torch.nn.utils.parametrizations.spectral_norm
    critic = seeded(lambda: nn.Sequential(sn(nn.Linear(8, 16)), nn.LeakyReLU(0.2), sn(nn.Linear(16, 1))), 12)
    gen = seeded(lambda: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)), 13)
    opt_d, opt_g = torch.optim.SGD(critic.parameters(), lr=0.05), torch.optim.SGD(gen.parameters(), lr=0.05)

    def step(real, z):
        opt_d.zero_grad()
        d_loss = F.relu(1 - critic(real)).mean() + F.relu(1 + critic(gen(z).detach())).mean()
        d_loss.backward()
        opt_d.step()
        for p in critic.parameters():
            p.requires_grad_(False)
        opt_g.zero_grad()
        g_loss = -critic(gen(z)).mean()
        g_loss.backward()
        opt_g.step()
        for p in critic.parameters():
            p.requires_grad_(True)
        return d_loss.detach(), g_loss.detach()

    return step, lambda i: (tn(240 + i, 8, 8), tn(250 + i, 8, 4))


def factory_bad_wgan_weight_clipping():  # hazard: 14
    critic = seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), 14)
    opt = torch.optim.SGD(critic.parameters(), lr=0.05)

    def clip_(module, c=0.1):
        for p in module.parameters():
            p.data = p.data.clamp(-c, c)  # expect: CG205

    def step(real, fake):
        opt.zero_grad()
        loss = critic(fake).mean() - critic(real).mean()  # expect: CG205 optional
        loss.backward()
        opt.step()  # expect: CG205 optional
        clip_(critic)
        return loss.detach()

    return step, lambda i: (tn(260 + i, 8, 8), tn(270 + i, 8, 8) + 0.5)


class MAML:
    def __init__(self, inner_steps=3, inner_lr=0.2):
        self.net = seeded(lambda: nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1)), 15)
        self.inner_steps, self.inner_lr = inner_steps, inner_lr
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def loss(self, params, x, y):
        return F.mse_loss(functional_call(self.net, params, (x,)), y)

    def adapt(self, params, xs, ys, xq, yq):
        losses = []
        for _ in range(self.inner_steps):
            g = grad(self.loss)(params, xs, ys)
            params = {k: p - self.inner_lr * g[k] for k, p in params.items()}
            losses.append(self.loss(params, xq, yq))
        return torch.stack(losses)

    def outer(self, task_losses):
        return task_losses.mean(0)[-1]

    def step(self, xs, ys, xq, yq):
        params = dict(self.net.named_parameters())
        per_task = vmap(self.adapt, in_dims=(None, 0, 0, 0, 0))(params, xs, ys, xq, yq)
        self.opt.zero_grad()
        loss = self.outer(per_task)
        loss.backward()
        self.opt.step()
        return loss.detach()


class MAMLPlusPlus(MAML):
    """Weights of the inner steps' losses are annealed towards the last one."""

    epoch = 0

    def importance(self, total=4):
        decay = min(self.epoch / total, 1.0) / self.inner_steps
        early = [1.0 / self.inner_steps - decay] * (self.inner_steps - 1)
        return early + [1.0 - sum(early)]

    def outer(self, task_losses):
        mean, loss = task_losses.mean(0), 0.0
        for w, l in zip(self.importance(), mean.unbind()):
            loss = loss + w * l  # expect: CG202 @mamlpp_importance
        self.epoch += 1
        return loss


def tasks(i):
    a = tn(280 + i, 3, 1, 1)
    xs, xq = tn(290 + i, 3, 6, 2), tn(300 + i, 3, 6, 2)
    f = lambda x: torch.sin(a * x.sum(-1, keepdim=True)) + 1
    return xs, f(xs), xq, f(xq)


def factory_bad_mamlpp_importance():  # hazard: 11
    return MAMLPlusPlus().step, tasks


def factory_ok_maml_vmap():  # hazard: 11
    return MAML().step, tasks


class ActivationStats:
    """Forward hooks; the hook either asks for a number or writes to a buffer that exists."""

    def __init__(self, net):
        self.values = {}
        for name, m in net.named_modules():
            if isinstance(m, nn.Linear):
                self.values[name] = torch.zeros(2, device=DEV)
                m.register_forward_hook(self.make(name))

    def make(self, name):
        raise NotImplementedError


class PrintingStats(ActivationStats):
    def make(self, name):
        def hook(module, args, out):
            line = f"{name}: mean {out.detach().mean():.3f}"  # expect: CG101 @hook_formats_a_tensor
            if "nan" in line:
                raise FloatingPointError(line)
        return hook


class BufferStats(ActivationStats):
    def make(self, name):
        def hook(module, args, out):
            with torch.no_grad():
                self.values[name].lerp_(torch.stack([out.mean(), out.std()]), 0.1)
            return out
        return hook


def hooked(kind, seed):
    net = seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)), seed)
    stats = kind(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x, y):
        opt.zero_grad()
        out = net(x)
        out.register_hook(lambda g: g.clamp(-0.05, 0.05))
        loss = F.mse_loss(out, y)
        loss.backward()
        opt.step()
        return loss.detach(), {k: v.clone() for k, v in stats.values.items()}

    return step, lambda i: (tn(310 + i, 8, 8), tn(320 + i, 8, 2))


def factory_bad_hook_formats_a_tensor():  # hazard: 2
    return hooked(PrintingStats, 16)


def factory_ok_hook_writes_a_buffer():  # hazard: 2
    return hooked(BufferStats, 17)


def sequence_mask(lengths, max_len=None):
    if max_len is None:
        max_len = lengths.max()
    return torch.arange(max_len, device=lengths.device)[None] < lengths[:, None]  # expect: CG101 @sequence_mask_of_longest


class Pooler(nn.Module):
    def __init__(self, trim):
        super().__init__()
        self.score, self.trim = nn.Linear(8, 1), trim

    @torch.no_grad()
    def forward(self, x, lengths):
        mask = sequence_mask(lengths, None if self.trim else x.shape[1])
        x = x[:, : mask.shape[1]]
        logits = self.score(x).squeeze(-1).masked_fill(~mask, float("-inf"))
        return (logits.softmax(-1)[..., None] * x).sum(1)


def ragged(i):
    return tn(330 + i, 4, 7, 8), ((torch.arange(4) + i) % 6 + 1).to(DEV)


def factory_bad_sequence_mask_of_longest():  # hazard: 1
    return seeded(lambda: Pooler(True), 18), ragged


def factory_ok_sequence_mask_padded():  # hazard: 1
    pooler = seeded(lambda: Pooler(False), 19)

    def step(x, lengths):
        torch._assert_async((lengths > 0).all())
        onehot = F.one_hot(lengths, num_classes=8)
        assert torch.cuda.memory_allocated() >= 0
        return pooler(x, lengths), onehot.sum(0)

    return step, ragged


# --- streams, timers, threads


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.side = torch.cuda.Stream()
        self.seen = nn.Buffer(torch.zeros(8))


class JoinedTowers(TwoTower):
    @torch.no_grad()
    def forward(self, x):
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            right = torch.tanh(self.b(x))
            self.seen.lerp_(right.mean(0), 0.2)
        left = torch.relu(self.a(x))
        main.wait_stream(self.side)
        return left * right, self.seen.clone()


class DetachedStatistics(TwoTower):
    @torch.no_grad()
    def forward(self, x):
        y = torch.relu(self.a(x))
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.seen.lerp_(self.b(y).mean(0), 0.2)  # expect: CG305 @side_stream_never_joined
        return y


class DoubleBuffered(TwoTower):
    """The event of one step is waited for in the next."""

    def __init__(self):
        super().__init__()
        self.ready = torch.cuda.Event()
        self.ready.record(self.side)

    @torch.no_grad()
    def forward(self, x):
        main = torch.cuda.current_stream()
        main.wait_event(self.ready)  # expect: CG305 @event_of_last_step
        out = self.a(x) + self.seen
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            self.seen.copy_(self.b(x).mean(0))
            self.ready.record()
        main.wait_stream(self.side)  # expect: CG305 optional @event_of_last_step
        return out


def factory_ok_side_stream_joined():  # hazard: 25
    return seeded(JoinedTowers, 20), lambda i: (tn(340 + i, 4, 8),)


def factory_bad_side_stream_never_joined():  # hazard: 25
    return seeded(DetachedStatistics, 21), lambda i: (tn(350 + i, 4, 8),)


def factory_bad_event_of_last_step():  # hazard: 25
    return seeded(DoubleBuffered, 22), lambda i: (tn(360 + i, 4, 8),)


class StopWatch(contextlib.ContextDecorator):
    totals = {}

    def __init__(self, name):
        self.name = name

    def __enter__(self):
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.start.record()
        return self

    def __exit__(self, *exc):
        self.end.record()
        torch.cuda.synchronize()  # expect: CG106 @stopwatch_decorator
        StopWatch.totals[self.name] = StopWatch.totals.get(self.name, 0.0) + self.start.elapsed_time(self.end)  # expect: CG107|CG106|CG210 optional @stopwatch_decorator
        return False


def factory_bad_stopwatch_decorator():  # hazard: 7
    net = seeded(lambda: nn.GRUCell(8, 8), 23)
    state = torch.zeros(4, 8, device=DEV)

    @StopWatch("cell")
    @torch.no_grad()
    def step(x):
        state.copy_(net(x, state))
        return state.clone()

    return step, lambda i: (tn(370 + i, 4, 8),)


class ThreadedExperts:
    def __init__(self, n):
        self.experts = [seeded(lambda: nn.Linear(8, 8), 24 + k) for k in range(n)]
        self.pool = ThreadPoolExecutor(max_workers=2)

    @staticmethod
    def run(expert, x):
        with torch.no_grad():
            return torch.tanh(expert(x))

    def __call__(self, x):
        futures = [self.pool.submit(self.run, e, x) for e in self.experts]  # expect: CG309 @threaded_experts
        return torch.stack([f.result() for f in futures]).mean(0)


def factory_bad_threaded_experts():  # hazard: 29
    return ThreadedExperts(3), lambda i: (tn(380 + i, 4, 8),)


class HostHyper:
    """Hyperparameters go through one pinned row, so that a single copy brings them all."""

    def __init__(self):
        self.host = torch.zeros(3, pin_memory=True)
        self.dev = torch.zeros(3, device=DEV)
        self.count = 0

    def push(self):
        self.count += 1
        self.host[0] = 0.1 / self.count
        self.host[1] = 0.9 if self.count > 2 else 0.5
        self.dev.copy_(self.host, non_blocking=True)  # expect: CG204|CG207 @pinned_hyperparameters
        return self.dev.unbind()


def factory_bad_pinned_hyperparameters():  # hazard: 13
    w, m, hyper = tn(390, 8, 2), torch.zeros(8, 2, device=DEV), HostHyper()

    @torch.no_grad()
    def step(x, y):
        lr, mu, _ = hyper.push()
        err = x @ w - y
        m.mul_(mu).add_(x.t() @ err / len(x))
        w.sub_(lr * m)
        return err.pow(2).mean(), w.clone()

    return step, lambda i: (tn(400 + i, 8, 8), tn(410 + i, 8, 2))


def factory_ok_pinned_log_row():  # hazard: 16
    log_host = torch.zeros(2, pin_memory=True)
    net = seeded(lambda: nn.Linear(8, 2), 30)
    opt = torch.optim.SGD(net.parameters(), lr=0.2)

    def step(x, y):
        opt.zero_grad()
        out = net(x)
        loss = F.mse_loss(out, y)
        loss.backward()
        opt.step()
        log_host.copy_(torch.stack([loss.detach(), out.detach().abs().max()]), non_blocking=True)
        return loss.detach()

    return step, lambda i: (tn(420 + i, 8, 8), tn(430 + i, 8, 2))


class GraphAware(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    @torch.no_grad()
    def forward(self, x):
        h = self.fc(x)
        if not torch.cuda.is_current_stream_capturing():  # expect: CG211 @scale_frozen_while_capturing
            self.scale.mul_(0.5).add_(h.abs().amax(0), alpha=0.5)
        return h / self.scale.clamp_min(1e-3)


def factory_bad_scale_frozen_while_capturing():  # hazard: 33
    return seeded(GraphAware, 31), lambda i: (tn(440 + i, 6, 8) * (1 + i),)


def common_noise(seed, shape, device):
    torch.manual_seed(seed)  # expect: CG302 @common_random_numbers
    return torch.randn(shape, device=device)


def factory_bad_common_random_numbers():  # hazard: 22
    """Evolution strategies: each generation's perturbations come from a seed that the workers agreed on."""
    theta, generation = tn(450, 6), itertools.count(1)

    def step(target):
        eps = common_noise(1000 + next(generation), (4, 6), target.device)
        eps = torch.cat([eps, -eps])
        fitness = -((theta + 0.3 * eps - target) ** 2).sum(-1)
        advantage = (fitness - fitness.mean()) / (fitness.std() + 1e-5)
        theta.add_((advantage[:, None] * eps).mean(0), alpha=0.5)
        return theta.clone(), fitness.max()

    return step, lambda i: (tn(460 + i, 6),)
