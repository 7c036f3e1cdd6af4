"""Third held-out set, away from language models: detection, augmentation, segmentation."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def _image(i, channels=2, size=8):
    return torch.randn(1, channels, size, size, generator=torch.Generator().manual_seed(i)).to("cuda")


def _boxes(i, count=6):
    corner = torch.rand(count, 2, generator=torch.Generator().manual_seed(i)) * 4
    return torch.cat([corner, corner + 1 + corner.flip(0) / 2], 1).to("cuda")


def _scores(i, count=6):
    return torch.rand(count, generator=torch.Generator().manual_seed(100 + i)).to("cuda")


def _overlap(a, b):
    low, high = torch.max(a[:, None, :2], b[None, :, :2]), torch.min(a[:, None, 2:], b[None, :, 2:])
    inside = (high - low).clamp_min(0).prod(-1)
    size_a, size_b = (a[:, 2:] - a[:, :2]).prod(-1), (b[:, 2:] - b[:, :2]).prod(-1)
    return inside / (size_a[:, None] + size_b[None] - inside)


def factory_bad_suppression_loop():  # hazard: 5
    def nms(boxes, scores, threshold):
        order = scores.argsort(descending=True)
        kept = torch.zeros_like(scores)
        while order.numel() > 0:
            best, rest = order[:1], order[1:]
            kept.index_fill_(0, best, 1.0)
            order = rest[_overlap(boxes[best], boxes[rest])[0] <= threshold]  # expect: CG104
        return kept

    return (lambda boxes, scores: nms(boxes, scores, 0.2)), lambda i: (_boxes(i), _scores(i))


def factory_ok_suppression_matrix():
    def step(boxes, scores):
        order = scores.argsort(descending=True)
        overlap = _overlap(boxes[order], boxes[order]).triu(1)
        return scores[order] * (1 - overlap.amax(0))

    return step, lambda i: (_boxes(i), _scores(i))


def factory_bad_keep_confident():  # hazard: 5
    def step(boxes, scores):
        keep = scores > 0.4
        boxes, scores = boxes[keep], scores[keep]  # expect: CG104
        return (boxes * scores[:, None]).sum(0)

    return step, lambda i: (_boxes(i), _scores(i))


def factory_ok_keep_confident_by_weight():
    def step(boxes, scores):
        weight = torch.where(scores > 0.4, scores, torch.zeros_like(scores))
        return (boxes * weight[:, None]).sum(0)

    return step, lambda i: (_boxes(i), _scores(i))


class Anchors(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes

    def forward(self, feature):
        rows = torch.arange(feature.shape[-2], device=feature.device)
        columns = torch.arange(feature.shape[-1], device=feature.device)
        y, x = torch.meshgrid(rows, columns, indexing="ij")
        centre = torch.stack([x, y], -1).float()
        sizes = torch.tensor(self.sizes, device=feature.device)  # expect: CG102 @anchor_sizes_from_list
        return centre[:, :, None] + sizes[None, None, :, None] * 0.5


def factory_bad_anchor_sizes_from_list():  # hazard: 3
    anchors = Anchors([1.0, 2.0, 4.0])
    return (lambda x: anchors(x) * x.mean()), lambda i: (_image(i),)


def factory_ok_anchor_grid_on_device():
    sizes = torch.tensor([1.0, 2.0, 4.0]).to("cuda")

    def step(x):
        line = torch.arange(x.shape[-1], device=x.device, dtype=x.dtype)
        y, column = torch.meshgrid(line, line, indexing="ij")
        return torch.stack([column, y], -1)[:, :, None] + sizes[:, None] * x.mean()

    return step, lambda i: (_image(i),)


def factory_bad_crop_at_box():  # hazard: 2
    def crop(x, box):
        left, top, right, bottom = box.long().tolist()  # expect: CG101
        return x[..., top:bottom, left:right].mean((-2, -1))  # expect: CG202 optional, CG208 optional

    return crop, lambda i: (_image(i), torch.tensor([1, 1, 4 + i % 3, 5], device="cuda"))


def factory_ok_crop_by_grid_sample():
    def step(x, box):
        line = torch.linspace(0, 1, 4, device=x.device)
        columns, rows = box[0] + line * (box[2] - box[0]), box[1] + line * (box[3] - box[1])
        grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1) / 4 - 1
        return F.grid_sample(x, grid[None], align_corners=False)

    return step, lambda i: (_image(i), torch.tensor([1.0, 1.0, 4.0 + i % 3, 5.0], device="cuda"))


class RandomFlip(nn.Module):
    def __init__(self, p=0.5):
        super().__init__()
        self.p = p

    def forward(self, x):
        if torch.rand(1).item() < self.p:  # expect: CG201 @random_flip_of_the_host
            return x.flip(-1)  # expect: CG201 optional @random_flip_of_the_host
        return x


def factory_bad_random_flip_of_the_host():  # hazard: 10
    flip = RandomFlip()
    return (lambda x: flip(x) * 2), lambda i: (_image(i),)


def factory_ok_flip_by_given_coin():
    def step(x, coin):
        return torch.where(coin < 0.5, x.flip(-1), x)

    return step, lambda i: (_image(i), torch.tensor([i % 3 / 3.0], device="cuda"))


def factory_bad_mixup_share_from_numpy():  # hazard: 11
    draw = np.random.default_rng(0)

    def mixup(x, y, alpha=0.4):
        share = float(draw.beta(alpha, alpha))
        return x * share + y * (1 - share)  # expect: CG202

    return mixup, lambda i: (_image(i), _image(i + 50))


def factory_bad_normalized_by_tuples():  # hazard: 3
    def normalize(x, mean=(0.4, 0.5), std=(0.2, 0.3)):
        mean = torch.as_tensor(mean, dtype=x.dtype, device=x.device).view(-1, 1, 1)  # expect: CG102
        std = torch.as_tensor(std, dtype=x.dtype, device=x.device).view(-1, 1, 1)  # expect: CG102
        return x.sub(mean).div(std)

    return normalize, lambda i: (_image(i),)


class Normalize(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4, 0.5]).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor([0.2, 0.3]).view(-1, 1, 1))

    def forward(self, x):
        return (x - self.mean) / self.std


def factory_ok_normalized_by_buffers():
    normalize = Normalize().to("cuda")
    return (lambda x: normalize(x)), lambda i: (_image(i),)


class MultiScale:
    def __init__(self):
        self.sizes = (4, 6, 8)
        self.count = 0

    def __call__(self, x):
        size = self.sizes[self.count % 3]
        self.count += 1  # expect: CG210 @scale_of_the_round
        x = F.interpolate(x, size=(size, size), mode="nearest")  # expect: CG202|CG208 @scale_of_the_round
        return x.mean((-2, -1))


def factory_bad_scale_of_the_round():  # hazard: 11
    scale = MultiScale()
    return (lambda x: scale(x)), lambda i: (_image(i),)


def factory_ok_resized_to_fixed_size():
    def step(x):
        return F.interpolate(x, size=(5, 5), mode="bilinear", align_corners=False)

    return step, lambda i: (_image(i),)


def factory_bad_histogram_of_labels():  # hazard: 5
    def confusion(guess, label):
        return torch.bincount(guess * 3 + label, minlength=9).view(3, 3).float()  # expect: CG104

    return confusion, lambda i: tuple(torch.tensor([(i + j * k) % 3 for j in range(6)]).to("cuda") for k in (1, 2))


def factory_ok_histogram_by_one_hot():
    def step(guess, label):
        classes = torch.arange(3, device=guess.device)
        return (guess[:, None] == classes).float().T @ (label[:, None] == classes).float()

    return step, lambda i: tuple(torch.tensor([(i + j * k) % 3 for j in range(6)]).to("cuda") for k in (1, 2))


def factory_bad_grown_until_equal():  # hazard: 1
    def fill(seed, mask):
        for _ in range(20):
            grown = F.max_pool2d(seed, 3, stride=1, padding=1) * mask
            if torch.equal(grown, seed):  # expect: CG101|CG105|CG108
                break
            seed = grown  # expect: CG201 optional
        return seed

    def inputs(i):
        seed = torch.zeros(1, 1, 8, 8)
        seed[..., i % 8, 0] = 1
        return seed.to("cuda"), (_image(i, 1) > -0.5).float()

    return fill, inputs


def factory_bad_gain_by_class_name():  # hazard: 1
    names = ("cat", "dog", "bird")
    gains = {"cat": 1.0, "dog": 2.0, "bird": 4.0}

    def step(x, logits):
        name = names[int(logits.argmax())]  # expect: CG101
        return x * gains[name]  # expect: CG202 optional

    return step, lambda i: (_image(i), F.one_hot(torch.tensor(i % 3), 3).float().to("cuda"))


def factory_ok_gain_by_class_index():
    gains = torch.tensor([1.0, 2.0, 4.0]).to("cuda")

    def step(x, logits):
        return x * gains.index_select(0, logits.argmax(-1, keepdim=True))

    return step, lambda i: (_image(i), F.one_hot(torch.tensor(i % 3), 3).float().to("cuda"))


def factory_bad_batch_norm_of_all_time():  # hazard: 1
    """momentum=None averages over all batches: torch itself reads how many there were."""
    norm = nn.BatchNorm2d(2, momentum=None).to("cuda").train()

    @torch.no_grad()
    def step(x):
        return norm(x) + norm.running_mean.view(-1, 1, 1)  # expect: CG101, CG202 optional

    return step, lambda i: (_image(i),)


def factory_ok_batch_norm_in_training():
    norm = nn.BatchNorm2d(2).to("cuda").train()

    @torch.no_grad()
    def step(x):
        return norm(x) + norm.running_mean.view(-1, 1, 1)

    return step, lambda i: (_image(i),)


def factory_bad_patches_by_mask():  # hazard: 5
    """Masked autoencoder: the visible patches alone go through the encoder."""
    encoder = nn.Linear(4, 4).to("cuda")

    @torch.no_grad()
    def step(patches, visible):
        tokens = encoder(torch.masked_select(patches, visible[:, None]).view(-1, 4))  # expect: CG104
        return tokens.mean(0)

    return step, lambda i: (_image(i, 2, 4).view(8, 4), torch.arange(8).to("cuda") % 2 == i % 2)


def factory_ok_patches_by_noise_order():
    """The same with a fixed count, chosen by sorting noise."""
    encoder = nn.Linear(4, 4).to("cuda")

    @torch.no_grad()
    def step(patches, noise):
        visible = noise.argsort()[:4]
        return encoder(patches.index_select(0, visible)).mean(0)

    return step, lambda i: (_image(i, 2, 4).view(8, 4), _scores(i, 8))
