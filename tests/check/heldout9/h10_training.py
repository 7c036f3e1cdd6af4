"""Training loops as they are found in small research repositories: optimizers, schedules, AMP, EMA, accumulation, mixup."""
import math
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

DEVICE = torch.device("cuda")


def randn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def randint(seed, high, *shape):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def mlp(din, hidden, dout, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(din, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, dout)).to(DEVICE)


def regression(index):
    return randn(100 + index, 16, 8), randn(200 + index, 16, 4)


@dataclass
class TrainConfig:
    lr: float = 2e-2
    betas: tuple = (0.9, 0.99)
    grad_clip: float = 1.0
    weight_decay: float = 0.0


class Trainer:
    def __init__(self, model, optimizer, cfg):
        self.model, self.optimizer, self.cfg = model, optimizer, cfg

    def loss(self, x, y):
        return F.smooth_l1_loss(self.model(x), y)

    def backward(self, loss):
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.cfg.grad_clip > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.grad_clip)


class PlainTrainer(Trainer):
    def fit_batch(self, x, y):
        loss = self.loss(x, y)
        self.backward(loss)
        self.optimizer.step()  # expect: CG202|CG203|CG101 @adam_without_capturable
        return {"loss": loss.detach()}


def factory_bad_adam_without_capturable():  # hazard: 11
    cfg = TrainConfig()
    model = mlp(8, 32, 4)
    trainer = PlainTrainer(model, torch.optim.Adam(model.parameters(), lr=cfg.lr, betas=cfg.betas), cfg)
    return trainer.fit_batch, regression


class CosineOnDevice:
    """Warm-up and cosine decay which live on the device, so that nothing has to be told to the optimizer."""

    def __init__(self, optimizer, base_lr, warmup, total):
        self.optimizer, self.base_lr, self.warmup, self.total = optimizer, base_lr, warmup, total
        self.it = torch.zeros((), device=DEVICE)

    @torch.no_grad()
    def step(self):
        self.it += 1
        ramp = (self.it / self.warmup).clamp(max=1.0)
        phase = ((self.it - self.warmup) / (self.total - self.warmup)).clamp(0.0, 1.0)
        lr = self.base_lr * ramp * 0.5 * (1.0 + torch.cos(math.pi * phase))
        for group in self.optimizer.param_groups:
            group["lr"].copy_(lr)


class ScheduledTrainer(Trainer):
    def __init__(self, model, optimizer, cfg, schedule):
        super().__init__(model, optimizer, cfg)
        self.schedule = schedule

    def fit_batch(self, x, y):
        self.schedule.step()
        loss = self.loss(x, y)
        self.backward(loss)
        self.optimizer.step()
        return {"loss": loss.detach(), "lr": self.optimizer.param_groups[0]["lr"].clone()}


def factory_ok_adam_capturable_device_cosine():  # hazard: 11
    cfg = TrainConfig()
    model = mlp(8, 32, 4, seed=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(cfg.lr, device=DEVICE), betas=cfg.betas, capturable=True)
    return ScheduledTrainer(model, optimizer, cfg, CosineOnDevice(optimizer, cfg.lr, 3, 20)).fit_batch, regression


def factory_bad_lambda_lr_with_tensor_lr():  # hazard: 11
    model = mlp(8, 24, 4, seed=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-1, device=DEVICE), capturable=True, weight_decay=0.01)
    scheduler = LambdaLR(optimizer, lr_lambda=lambda epoch: min(1.0, (epoch + 1) / 4) if epoch < 4 else 0.1 ** (epoch - 3))

    def train_one_batch(x, y):
        optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()  # expect: CG202
        return loss.detach()

    return train_one_batch, regression


class NativeScaler:
    """After timm's NativeScaler."""

    def __init__(self, **kwargs):
        self._scaler = torch.amp.GradScaler("cuda", **kwargs)

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None):
        self._scaler.scale(loss).backward()
        if clip_grad is not None:
            self._scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
        self._scaler.step(optimizer)  # expect: CG101 @native_scaler_sgd
        self._scaler.update()


def factory_bad_native_scaler_sgd():  # hazard: 1
    model = mlp(8, 32, 4, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss_scaler = NativeScaler(init_scale=256.0)

    def step(x, y):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        return loss.detach()

    return step, regression


class FusedScaler:
    def __init__(self, **kwargs):
        self._scaler = torch.amp.GradScaler("cuda", **kwargs)

    def __call__(self, loss, optimizer, parameters):
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm


def factory_ok_fused_adam_scaler():  # hazard: 1
    model = mlp(8, 32, 4, seed=4)
    params = list(model.parameters())
    optimizer = torch.optim.Adam(params, lr=1e-2, fused=True, capturable=True)
    loss_scaler = FusedScaler(init_scale=64.0, growth_interval=2)

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            loss = F.mse_loss(model(x).float(), y)
        norm = loss_scaler(loss, optimizer, params)
        return loss.detach(), norm

    return step, regression


class ModelEma(nn.Module):
    def __init__(self, model, decay=0.999, use_warmup=True, warmup_gamma=1.0, warmup_power=2 / 3):
        super().__init__()
        self.module = mlp(8, 16, 4, seed=5)
        self.module.load_state_dict(model.state_dict())
        self.decay, self.use_warmup, self.gamma, self.power = decay, use_warmup, warmup_gamma, warmup_power
        self.updates = 0

    def get_decay(self):
        if not self.use_warmup:
            return self.decay
        return min(self.decay, max(0.0, 1 - (1 + self.updates / self.gamma) ** -self.power))

    @torch.no_grad()
    def update(self, model):
        self.updates += 1  # expect: CG210 optional @ema_decay_warmup
        weight = 1.0 - self.get_decay()
        for ema_v, model_v in zip(self.module.parameters(), model.parameters()):
            ema_v.lerp_(model_v, weight)  # expect: CG202 @ema_decay_warmup


def factory_bad_ema_decay_warmup():  # hazard: 11
    model = mlp(8, 16, 4, seed=6)
    ema = ModelEma(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        ema.update(model)
        with torch.no_grad():
            return loss.detach(), ema.module(x)

    return step, regression


class ShadowWeights:
    """torch_ema: store, copy_to, restore; all of it into memory that exists from the beginning."""

    def __init__(self, params, decay):
        self.params = list(params)
        self.shadow = [p.detach().clone() for p in self.params]
        self.backup = [torch.empty_like(p) for p in self.params]
        self.decay = decay
        self.num_updates = torch.zeros((), device=DEVICE)

    @torch.no_grad()
    def update(self):
        self.num_updates += 1
        decay = torch.minimum(torch.full_like(self.num_updates, self.decay), (1 + self.num_updates) / (10 + self.num_updates))
        for s, p in zip(self.shadow, self.params):
            s.sub_((1 - decay) * (s - p))

    def __enter__(self):
        with torch.no_grad():
            for b, p, s in zip(self.backup, self.params, self.shadow):
                b.copy_(p)
                p.copy_(s)
        return self

    def __exit__(self, *exc):
        with torch.no_grad():
            for b, p in zip(self.backup, self.params):
                p.copy_(b)
        return False


def factory_ok_ema_store_and_restore():  # hazard: 14
    model = mlp(8, 16, 4, seed=7)
    ema = ShadowWeights(model.parameters(), 0.99)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5, nesterov=True)

    def step(x, y):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        ema.update()
        with ema, torch.no_grad():
            val = F.mse_loss(model(x), y)
        return val

    return step, regression


class Accumulator:
    def __init__(self, model, every):
        self.model, self.every = model, every
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        self.micro_step = 0

    def __call__(self, x, y):
        loss = F.mse_loss(self.model(x), y)
        (loss / self.every).backward()
        self.micro_step += 1  # expect: CG210 optional @grad_accumulation_modulo
        if self.micro_step % self.every == 0:  # expect: CG201 @grad_accumulation_modulo
            self.optimizer.step()  # expect: CG201 optional @grad_accumulation_modulo
            self.optimizer.zero_grad(set_to_none=False)
        return loss.detach()


def factory_bad_grad_accumulation_modulo():  # hazard: 10
    return Accumulator(mlp(8, 16, 4, seed=8), every=3), regression


class CheckpointedTower(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        torch.manual_seed(9)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = x + (checkpoint(block, x, use_reentrant=False, preserve_rng_state=False) if i % 2 == 0 else block(x))
        return self.head(x)


def factory_ok_microbatches_checkpointed():  # hazard: 10
    model = CheckpointedTower(8, 3).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accum = 4

    def step(x, y):
        optimizer.zero_grad()
        total = torch.zeros((), device=x.device)
        for k, (xs, ys) in enumerate(zip(x.chunk(accum), y.chunk(accum))):
            loss = F.mse_loss(model(xs), ys) / accum
            loss.backward()
            total += loss.detach()
            if (k + 1) % accum == 0:
                optimizer.step()
        return total

    return step, regression


@dataclass
class Mixup:
    alpha: float = 0.4
    num_classes: int = 6
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(3))

    def one_hot(self, target, smoothing=0.1):
        off = smoothing / self.num_classes
        out = torch.full((target.shape[0], self.num_classes), off, device=target.device)
        return out.scatter_(1, target[:, None], 1.0 - smoothing + off)

    def __call__(self, x, target):
        lam = float(self.rng.beta(self.alpha, self.alpha))
        y1, y2 = self.one_hot(target), self.one_hot(target.flip(0))
        x_flipped = x.flip(0).mul_(1.0 - lam)  # expect: CG202 @timm_mixup
        return x.mul(lam).add_(x_flipped), y1 * lam + y2 * (1.0 - lam)  # expect: CG202 optional @timm_mixup


def factory_bad_timm_mixup():  # hazard: 11
    model = mlp(8, 24, 6, seed=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    mixup = Mixup()

    def step(x, target):
        x, soft = mixup(x, target)
        optimizer.zero_grad()
        loss = torch.sum(-soft * F.log_softmax(model(x), dim=-1), dim=-1).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, lambda i: (randn(300 + i, 8, 8), randint(400 + i, 6, 8))


def factory_ok_mixup_lambda_from_loader():  # hazard: 11
    model = mlp(8, 24, 6, seed=11)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none")

    def step(batch):
        x, target, lam, perm = batch["x"], batch["y"], batch["lam"], batch["perm"]
        mixed = lam[:, None] * x + (1 - lam[:, None]) * x[perm]
        optimizer.zero_grad()
        logits = model(mixed)
        loss = (lam * criterion(logits, target) + (1 - lam) * criterion(logits, target[perm])).mean()
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach(), "acc": (logits.argmax(-1) == target).float().mean()}

    def inputs(i):
        rng = np.random.default_rng(50 + i)
        return ({"x": randn(500 + i, 8, 8), "y": randint(600 + i, 6, 8), "lam": torch.from_numpy(rng.beta(1.0, 1.0, 8).astype("float32")).to(DEVICE),
                 "perm": torch.from_numpy(rng.permutation(8)).to(DEVICE)},)

    return step, inputs


class GradualUnfreezing:
    """ULMFiT: one more layer each epoch, an epoch being two batches here."""

    def __init__(self, model, batches_per_epoch=2):
        self.layers = [m for m in model if isinstance(m, nn.Linear)][::-1]
        self.batches_per_epoch, self.seen = batches_per_epoch, 0

    def on_batch_start(self):
        epoch = self.seen // self.batches_per_epoch
        for depth, layer in enumerate(self.layers):
            layer.requires_grad_(depth <= epoch)  # expect: CG201|CG210|CG202 optional @gradual_unfreezing
        self.seen += 1  # expect: CG210 optional @gradual_unfreezing


def factory_bad_gradual_unfreezing():  # hazard: 10
    model = mlp(8, 24, 4, seed=12)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    callback = GradualUnfreezing(model)

    def step(x, y):
        callback.on_batch_start()
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)  # expect: CG201 optional
        loss.backward()  # expect: CG201
        optimizer.step()  # expect: CG201 optional
        return loss.detach()

    return step, regression


class EarlyStopping:
    def __init__(self, patience=2, min_delta=1e-3):
        self.patience, self.min_delta = patience, min_delta
        self.best, self.wait = None, 0

    def update(self, val):
        if self.best is None:
            self.best = val
        elif val < self.best - self.min_delta:  # expect: CG108|CG101 @early_stopping
            self.best, self.wait = val, 0
        else:
            self.wait += 1
        return self.wait >= self.patience


def factory_bad_early_stopping():  # hazard: 9
    model = mlp(8, 16, 4, seed=13)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stopper = EarlyStopping()

    def step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if not stopper.update(loss.detach()):
            optimizer.step()
        return loss.detach()

    return step, regression


def factory_ok_best_weights_on_device():  # hazard: 9
    model = mlp(8, 16, 4, seed=14)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    best = torch.full((), float("inf"), device=DEVICE)
    best_weights = [p.detach().clone() for p in model.parameters()]
    patience = torch.zeros((), dtype=torch.long, device=DEVICE)

    def step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            better = loss < best
            best.copy_(torch.minimum(best, loss))
            patience.add_(1).mul_((~better).long())
            for kept, p in zip(best_weights, model.parameters()):
                kept.copy_(torch.where(better, p, kept))
        return loss.detach(), best.clone(), patience.clone(), best_weights[0].sum()

    return step, regression


class MetricLogger:
    def __init__(self):
        self.history, self.steps = [], 0

    def log(self, **scalars):
        self.steps += 1  # expect: CG210 optional @metric_history
        self.history.append({k: v.detach() for k, v in scalars.items()})  # expect: CG210 @metric_history


def factory_quiet_metric_history():  # hazard: 32
    model = mlp(8, 16, 4, seed=15)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logger = MetricLogger()

    def step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        logger.log(loss=loss, grad=model[0].weight.grad.norm())
        optimizer.step()
        return loss.detach()

    return step, regression


class GradReverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lambda_):
        ctx.lambda_ = lambda_
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.neg() * ctx.lambda_, None  # expect: CG202 @dann_lambda_in_backward


class DANN:
    def __init__(self, total=12):
        torch.manual_seed(16)
        self.encoder, self.label, self.domain = nn.Linear(8, 8).to(DEVICE), mlp(8, 16, 4, seed=17), nn.Linear(8, 1).to(DEVICE)
        self.params = [p for m in (self.encoder, self.label, self.domain) for p in m.parameters()]
        self.optimizer = torch.optim.SGD(self.params, lr=0.3)
        self.batch_idx, self.total = 0, total

    def __call__(self, x, y):
        p = self.batch_idx / self.total
        lambda_ = 2.0 / (1.0 + math.exp(-10 * p)) - 1
        self.batch_idx += 1
        side = (torch.arange(x.shape[0], device=x.device) % 2).float()
        z = self.encoder(x + 2.0 * side[:, None])
        adversary = F.binary_cross_entropy_with_logits(self.domain(GradReverse.apply(z, lambda_)).squeeze(-1), side)
        loss = F.mse_loss(self.label(z), y) + 2.0 * adversary
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach(), adversary.detach()


def factory_bad_dann_lambda_in_backward():  # hazard: 11
    return DANN(), regression
