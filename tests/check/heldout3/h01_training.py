"""Third held-out set: training steps, their optimizers, losses and bookkeeping."""

from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 4


def _x(i, rows=3):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(i)).to("cuda")


def _labels(i):
    return torch.tensor([i % WIDTH, (i + 1) % WIDTH, -1 if i % 2 else 0]).to("cuda")


def _batch(i):
    return _x(i), torch.tensor([i % WIDTH, (2 * i + 1) % WIDTH, 3]).to("cuda")


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to("cuda")


def _trained(optimizer_of):
    """A plain training step; returns the loss and a copy of the last weight."""
    model = _model()
    optimizer = optimizer_of(model.parameters())

    def step(x, label):
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), label)
        loss.backward()
        optimizer.step()  # expect: CG202 @adam_counts_on_the_host, CG203 optional @adam_counts_on_the_host
        return loss.detach(), model[2].weight.detach().clone()

    return step, _batch


def factory_ok_sgd_with_momentum():
    return _trained(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))


def factory_ok_adam_that_may_be_captured():
    return _trained(lambda p: torch.optim.AdamW(p, lr=0.05, capturable=True))


def factory_bad_adam_counts_on_the_host():  # hazard: 11
    return _trained(lambda p: torch.optim.Adam(p, lr=0.05))


def factory_bad_rate_schedule_in_step():  # hazard: 11
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step(x, label):
        optimizer.zero_grad()
        F.cross_entropy(model(x), label).backward()
        optimizer.step()  # expect: CG202
        schedule.step()  # expect: CG210 optional
        return model[2].weight.detach().clone()

    return step, _batch


def factory_bad_own_rate_decay():  # hazard: 11
    weight = torch.ones(WIDTH, device="cuda", requires_grad=True)
    state = {"step": 0}

    def step(x):
        state["step"] += 1  # expect: CG210
        (grad,) = torch.autograd.grad((x @ weight).square().mean(), weight)
        with torch.no_grad():
            weight.add_(grad, alpha=-0.1 / state["step"])  # expect: CG202
        return weight.detach().clone()

    return step, lambda i: (_x(i),)


def factory_ok_own_rate_on_device():
    weight = torch.ones(WIDTH, device="cuda", requires_grad=True)
    count = torch.zeros(1, device="cuda")

    def step(x):
        count.add_(1)
        (grad,) = torch.autograd.grad((x @ weight).square().mean(), weight)
        with torch.no_grad():
            weight.sub_(grad * 0.1 / count)
        return weight.detach().clone()

    return step, lambda i: (_x(i),)


def factory_bad_clip_that_looks():  # hazard: 1
    model = _model()

    def step(x, label):
        model.zero_grad()
        F.cross_entropy(model(x), label).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)  # expect: CG101|CG108
        return norm, model[0].weight.grad.clone()

    return step, _batch


def factory_ok_clip():
    model = _model()

    def step(x, label):
        model.zero_grad()
        F.cross_entropy(model(x), label).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return norm, model[0].weight.grad.clone()

    return step, _batch


class Meter:
    def __init__(self):
        self.values = []
        self.total = 0.0

    def update(self, value):
        self.total += value.item()  # expect: CG101 @meter_reads_the_loss, CG210 optional @meter_reads_the_loss
        self.values.append(value.detach())  # expect: CG210 optional @meter_reads_the_loss

    @property
    def mean(self):
        return self.total / max(len(self.values), 1)


def factory_bad_meter_reads_the_loss():  # hazard: 1
    meter = Meter()

    def step(x):
        loss = x.square().mean()
        meter.update(loss)
        return loss

    return step, lambda i: (_x(i),)


def factory_ok_meter_on_device():
    total = torch.zeros((), device="cuda")

    def step(x):
        loss = x.square().mean()
        total.add_(loss)
        return loss, total.clone()

    return step, lambda i: (_x(i),)


def factory_bad_skips_a_step_that_overflowed():  # hazard: 9
    weight = torch.ones(WIDTH, device="cuda")

    def step(grad):
        found = torch.isinf(grad).any()
        if not found:  # expect: CG108
            weight.sub_(grad.sum(0) * 0.1)
        return weight.clone()

    return step, lambda i: (_x(i),)


def factory_ok_skips_by_where():
    weight = torch.ones(WIDTH, device="cuda")

    def step(grad):
        fine = torch.isfinite(grad).all()
        weight.sub_(torch.where(fine, grad.sum(0) * 0.1, torch.zeros_like(weight)))
        return weight.clone()

    return step, lambda i: (_x(i),)


class Average:
    """Exponential average of weights whose decay warms up."""

    def __init__(self, weight):
        self.mean = weight.detach().clone()
        self.updates = 0

    def update(self, weight):
        self.updates += 1  # expect: CG210 @decay_warms_up
        decay = min(0.999, (1 + self.updates) / (10 + self.updates))
        self.mean.mul_(decay).add_(weight, alpha=1 - decay)  # expect: CG202 @decay_warms_up


def factory_bad_decay_warms_up():  # hazard: 11
    average = Average(torch.zeros(3, WIDTH, device="cuda"))

    def step(x):
        average.update(x)
        return average.mean.clone()

    return step, lambda i: (_x(i),)


def factory_ok_decay_fixed():
    mean = torch.zeros(3, WIDTH, device="cuda")

    def step(x):
        mean.lerp_(x, 0.1)
        return mean.clone()

    return step, lambda i: (_x(i),)


def factory_bad_accumulates_two_batches():  # hazard: 10
    weight, grads = torch.ones(WIDTH, device="cuda"), torch.zeros(WIDTH, device="cuda")
    state = {"micro": 0}

    def step(x):
        grads.add_(x.mean(0))
        state["micro"] += 1  # expect: CG210
        if state["micro"] % 2 == 0:  # expect: CG201
            weight.sub_(grads)  # expect: CG201 optional
            grads.zero_()  # expect: CG201 optional
        return weight.clone()

    return step, lambda i: (_x(i),)


def factory_bad_mean_over_valid():  # hazard: 1
    def step(x, label):
        valid = (label != -1).sum().item()  # expect: CG101
        loss = F.cross_entropy(x, label, ignore_index=-1, reduction="sum")
        return loss / max(valid, 1)  # expect: CG202 optional

    return step, lambda i: (_x(i), _labels(i))


def factory_ok_mean_over_valid():
    def step(x, label):
        return F.cross_entropy(x, label, ignore_index=-1)

    return step, lambda i: (_x(i), _labels(i))


def factory_bad_one_hot_of_the_host():  # hazard: 2
    def targets(label, classes):
        out = torch.zeros(label.shape[0], classes)
        out.scatter_(1, label.cpu().clamp_min(0).unsqueeze(1), 1.0)  # expect: CG101
        return out.to(label.device)  # expect: CG102

    def step(x, label):
        return -(x.log_softmax(-1) * targets(label, WIDTH)).sum()

    return step, lambda i: (_x(i), _labels(i))


def factory_bad_logs_by_format():  # hazard: 2
    lines = deque(maxlen=4)

    def step(x):
        loss = x.square().mean()
        lines.append(f"loss {loss:.3f}")  # expect: CG101, CG210 optional
        return loss * 2

    return step, lambda i: (_x(i),)


def factory_bad_asserts_finite():  # hazard: 9
    def step(x):
        y = x.exp()
        assert torch.isfinite(y).all(), "overflow"  # expect: CG108
        return y

    return step, lambda i: (_x(i),)


def factory_ok_asserts_on_device():
    def step(x):
        y = x.exp()
        torch._assert_async(torch.isfinite(y).all())
        return y

    return step, lambda i: (_x(i),)


def factory_ok_autocast():
    model = _model()

    @torch.no_grad()
    def step(x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(x).float()

    return step, lambda i: (_x(i),)


def factory_ok_weight_norm():
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)).to("cuda")

    @torch.no_grad()
    def step(x):
        return layer(x)

    return step, lambda i: (_x(i),)


def factory_bad_weight_replaced_by_decay():  # hazard: 14
    layer = nn.Linear(WIDTH, WIDTH, bias=False).to("cuda")

    @torch.no_grad()
    def step(x):
        layer.weight.data = layer.weight.data * 0.5  # expect: CG205|CG206
        return layer(x)  # expect: CG205|CG206 optional

    return step, lambda i: (_x(i),)


def factory_ok_weight_decayed_in_place():
    layer = nn.Linear(WIDTH, WIDTH, bias=False).to("cuda")

    @torch.no_grad()
    def step(x):
        layer.weight.mul_(0.5)
        return layer(x)

    return step, lambda i: (_x(i),)


def factory_bad_temperature_on_cpu():  # hazard: 12
    """A scale that learns, as a parameter that was left on the CPU."""
    scale = torch.tensor(1.0)

    def step(x):
        y = x * scale  # expect: CG203
        scale.mul_(0.5)  # expect: CG210 optional
        return y

    return step, lambda i: (_x(i),)


def factory_ok_constant_on_cpu():
    scale = torch.tensor(2.0)
    return (lambda x: x * scale), lambda i: (_x(i),)


def factory_ok_lazy_layer():
    layer = nn.LazyLinear(WIDTH).to("cuda")

    @torch.no_grad()
    def step(x):
        return layer(x)

    return step, lambda i: (_x(i),)


def factory_bad_teacher_and_student_swap():  # hazard: 14
    pair = {"teacher": torch.zeros(WIDTH, device="cuda"), "student": torch.ones(WIDTH, device="cuda")}

    def step(x):
        pair["student"].add_(x.mean(0))  # expect: CG205
        pair["teacher"], pair["student"] = pair["student"], pair["teacher"]
        return pair["teacher"].clone()  # expect: CG205 optional

    return step, lambda i: (_x(i),)


def factory_ok_teacher_follows():
    teacher, student = torch.zeros(WIDTH, device="cuda"), torch.ones(WIDTH, device="cuda")

    def step(x):
        student.add_(x.mean(0))
        teacher.copy_(student)
        return teacher.clone()

    return step, lambda i: (_x(i),)
