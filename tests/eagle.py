"""EAGLE-3 heads for tests: random ones and trained ones of tiny models, as files in either published layout."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onegraph.formats.checkpoint import Checkpoint, write_checkpoint
from onegraph.models.eagle import EagleConfig, EagleHead
from onegraph.models.eagle_net import EagleNet, head_config, head_rows, head_tensors
from onegraph.models.eagle_texts import Shelf, Texts, Written
from onegraph.models.eagle_training import Exam, Teacher, train
from onegraph.models.llama import Llama


def net_of(model: Llama, layers: Sequence[int], vocabulary: Tensor, seed: int = 0, positions: int = 256) -> EagleNet:
    """A head that begins where the model ends, on the model's device."""
    torch.manual_seed(seed)
    config = EagleConfig.from_dict(head_config(model.config, layers, len(vocabulary), "tests/tiny"))
    net = EagleNet(config, len(layers), positions).to(model.device)
    net.start_from(model.norm, head_rows(model, vocabulary))
    return net


def write_head(path: Path, net: EagleNet, layers: Sequence[int], vocabulary: Tensor, **changes: Any) -> Path:
    """In speculators' layout; `changes` go over config.json."""
    config = head_config(net.config.layer, layers, len(vocabulary), "tests/tiny") | changes
    write_checkpoint(path, config, head_tensors(net, vocabulary, torch.float32).items())
    return path


def load_head(path: Path, model: Llama) -> EagleHead:
    with Checkpoint.open(path) as checkpoint:
        return EagleHead.load(checkpoint, model)


def overfit(model: Llama, net: EagleNet, texts: list[list[int]], layers: tuple[int, ...], vocabulary: Tensor) -> float:
    """Trains `net` on a few texts until it knows them; tokens that a round of three drafts then promises."""
    read = Texts(model, [Written(text) for text in texts], layers, [Shelf(torch.device("cpu"), 1 << 30)])
    teacher = Teacher(model, net, vocabulary, 3)
    exam, sizes = Exam(teacher, read, len(texts)), {"batch": len(texts), "steps": 240, "looks": 3}
    return train(teacher, read, exam, rate=6e-3, seconds=60.0, seed=0, **sizes).after.tokens
