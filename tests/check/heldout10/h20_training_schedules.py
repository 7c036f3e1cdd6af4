"""Training steps with schedules: EMA start, milestones, accumulation, stochastic depth, unfreezing."""
import torch
import torch.nn as nn
import torch.nn.functional as F

STEPS = 24
N, D = 8, 16


def rnd(index, *shape, salt=0):
    g = torch.Generator().manual_seed(7919 * salt + index)
    return torch.randn(*shape, generator=g).to("cuda")


def weight(seed, *shape):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) / shape[0] ** 0.5).to("cuda")


def ls_grad(w, x, y):
    """Gradient of 0.5 * mean squared error of a linear map, by hand."""
    return x.t() @ (x @ w - y) / x.shape[0]


# --------------------------------------------------------------- EMA that starts late

class HostEma:
    def __init__(self, param, start=10, decay=0.95):
        self.param, self.start, self.decay = param, start, decay
        self.shadow = param.clone()
        self.num_updates = 0

    def update(self):
        self.num_updates += 1  # expect: CG210 optional @ema_start
        if self.num_updates <= self.start:  # expect: CG201 @ema_start
            self.shadow.copy_(self.param)
        else:
            self.shadow.lerp_(self.param, 1 - self.decay)


class DeviceEma:
    def __init__(self, param, start=10, decay=0.95):
        self.param, self.start, self.decay = param, start, decay
        self.shadow = param.clone()
        self.num_updates = torch.zeros((), device="cuda")

    def update(self):
        self.num_updates += 1
        decay = (self.num_updates > self.start).float() * self.decay
        self.shadow.mul_(decay).add_(self.param * (1 - decay))


def ema_case(ema_cls):
    w = weight(21, D, D)
    ema = ema_cls(w)

    def step(x, y):
        w.sub_(0.3 * ls_grad(w, x, y))
        ema.update()
        return x @ ema.shadow

    def inputs(index):
        return rnd(index, N, D, salt=1), rnd(index, N, D, salt=2)

    return step, inputs


def factory_bad_ema_start():
    return ema_case(HostEma)


def factory_ok_ema_device():
    return ema_case(DeviceEma)


# --------------------------------------------------------------- learning-rate milestones

def factory_bad_multistep_lr():
    torch.manual_seed(22)
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 4)).to("cuda")
    params = list(model.parameters())
    opt = torch.optim.SGD(params, lr=0.5)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, milestones=[9, 17], gamma=0.1)

    def step(x, y):
        loss = F.mse_loss(model(x), y)
        for p, g in zip(params, torch.autograd.grad(loss, params)):
            p.grad = g
        opt.step()  # expect: CG202
        sched.step()  # expect: CG210 optional
        return loss.detach(), params[0].detach().clone()

    def inputs(index):
        return rnd(index, N, D, salt=3), rnd(index, N, 4, salt=4)

    return step, inputs


class TensorLrSgd:
    """SGD with momentum whose learning rate lives on the device; the trainer fills it between steps."""

    def __init__(self, params, lr, milestones, gamma=0.1, momentum=0.5):
        self.params = params
        self.bufs = [torch.zeros_like(p) for p in params]
        self.base, self.milestones, self.gamma, self.momentum = lr, milestones, gamma, momentum
        self.lr = torch.full((), lr, device="cuda")
        self.last_lr = lr

    def set_epoch(self, epoch):
        passed = sum(epoch >= m for m in self.milestones)
        self.last_lr = self.base * self.gamma**passed
        self.lr.fill_(self.last_lr)

    @torch.no_grad()
    def step(self, grads):
        for p, buf, g in zip(self.params, self.bufs, grads):
            buf.mul_(self.momentum).add_(g)
            p.sub_(self.lr * buf)


def factory_ok_multistep_lr_tensor():
    torch.manual_seed(22)
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 4)).to("cuda")
    params = list(model.parameters())
    opt = TensorLrSgd(params, lr=0.3, milestones=[9, 17])

    def step(x, y):
        loss = F.mse_loss(model(x), y)
        opt.step(torch.autograd.grad(loss, params))
        return loss.detach(), params[0].detach().clone()

    def inputs(index):
        opt.set_epoch(index)
        return rnd(index, N, D, salt=3), rnd(index, N, 4, salt=4)

    return step, inputs


# --------------------------------------------------------------- gradient accumulation

class Accumulator:
    def __init__(self, every=8):
        self.every = every
        self.micro = 0
        self.grad = torch.zeros(D, D, device="cuda")

    def boundary(self):
        return (self.micro + 1) % self.every == 0


def factory_bad_accumulation_boundary():
    w = weight(23, D, D)
    acc = Accumulator()

    def step(x, y):
        out = x @ w
        acc.grad.add_(ls_grad(w, x, y), alpha=1 / acc.every)
        if acc.boundary():  # expect: CG201
            w.sub_(acc.grad, alpha=0.8)
            acc.grad.zero_()
        acc.micro += 1  # expect: CG210 optional
        return out

    def inputs(index):
        return rnd(index, N, D, salt=5), rnd(index, N, D, salt=6)

    return step, inputs


def factory_ok_accumulation_masked():
    w = weight(23, D, D)
    acc = Accumulator()
    micro = torch.zeros((), dtype=torch.long, device="cuda")
    report = []

    def step(x, y):
        out = x @ w
        acc.grad.add_(ls_grad(w, x, y), alpha=1 / acc.every)
        micro.add_(1)
        fire = (micro % acc.every == 0).float()
        w.sub_(acc.grad * (0.8 * fire))
        acc.grad.mul_(1 - fire)
        if acc.boundary():
            report.append(f"optimizer step after micro batch {acc.micro}")
        acc.micro += 1
        return out

    def inputs(index):
        return rnd(index, N, D, salt=5), rnd(index, N, D, salt=6)

    return step, inputs


# --------------------------------------------------------------- stochastic depth with a late ramp

class RampedResidual:
    def __init__(self):
        self.blocks = [weight(24 + i, D, D) for i in range(3)]
        self.t = 0

    def drop_rate(self):
        return min(0.6, max(0.0, (self.t - 8) * 0.06))

    def forward(self, x, coins):
        rate = self.drop_rate()
        self.t += 1  # expect: CG210 optional @drop_ramp
        for i, w in enumerate(self.blocks):
            keep = (coins[i] >= rate).float()  # expect: CG202 @drop_ramp
            x = x + keep[:, None] * torch.tanh(x @ w)
        return x


class RampedResidualDevice:
    def __init__(self):
        self.blocks = [weight(24 + i, D, D) for i in range(3)]

    def forward(self, x, coins, rate):
        for i, w in enumerate(self.blocks):
            keep = (coins[i] >= rate).float()
            x = x + keep[:, None] * torch.tanh(x @ w)
        return x


def coins(index):
    g = torch.Generator().manual_seed(5000 + index)
    return torch.rand(3, N, generator=g).to("cuda")


def factory_bad_drop_ramp():
    net = RampedResidual()

    def step(x, c):
        return net.forward(x, c)

    def inputs(index):
        return rnd(index, N, D, salt=7), coins(index)

    return step, inputs


def factory_ok_drop_ramp_input():
    net = RampedResidualDevice()

    def step(x, c, rate):
        return net.forward(x, c, rate)

    def inputs(index):
        rate = min(0.6, max(0.0, (index - 8) * 0.06))
        return rnd(index, N, D, salt=7), coins(index), torch.full((1,), rate, device="cuda")

    return step, inputs


# --------------------------------------------------------------- the backbone thaws late

class Finetune(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(D, D)
        self.head = nn.Linear(D, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.backbone(x)))


def factory_bad_unfreeze():
    torch.manual_seed(25)
    model = Finetune().to("cuda")
    model.backbone.requires_grad_(False)

    def on_step_begin(index):
        if index >= 9:
            model.backbone.requires_grad_(True)

    def step(x, y):
        trainable = [p for p in model.parameters() if p.requires_grad]  # expect: CG201
        loss = F.mse_loss(model(x), y)
        grads = torch.autograd.grad(loss, trainable)
        with torch.no_grad():
            for p, g in zip(trainable, grads):  # expect: CG201 optional
                p.sub_(g, alpha=0.5)
        return loss.detach()

    def inputs(index):
        on_step_begin(index)
        return rnd(index, N, D, salt=8), rnd(index, N, 4, salt=9)

    return step, inputs


def factory_ok_unfreeze_gate():
    torch.manual_seed(25)
    model = Finetune().to("cuda")
    params = list(model.parameters())
    gates = [torch.zeros((), device="cuda") if n.startswith("backbone") else torch.ones((), device="cuda")
             for n, _ in model.named_parameters()]
    phase = {"name": "head only"}

    def on_step_begin(index):
        if index >= 9:
            phase["name"] = "full"
            for gate in gates:
                gate.fill_(1.0)

    def step(x, y):
        loss = F.mse_loss(model(x), y)
        grads = torch.autograd.grad(loss, params)
        with torch.no_grad():
            for p, g, gate in zip(params, grads, gates):
                p.sub_(0.5 * gate * g)
        return loss.detach()

    def inputs(index):
        on_step_begin(index)
        return rnd(index, N, D, salt=8), rnd(index, N, 4, salt=9)

    return step, inputs
