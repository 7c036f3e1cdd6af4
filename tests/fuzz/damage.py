"""Ways to damage bytes, JSON and tensors, all drawn from one `random.Random`."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ABSURD: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 7, 64, 2**16, 2**31 - 1, 2**31, 2**63, 2**64, 10**30, 0.5, -0.0, 1e-30, 1e30,
    1e308, float("nan"), float("inf"), "", "x", "4", "null", "\0", "\n", "é😀", "x" * 5000, [], {}, [[]], [0] * 100,
    [1, "2", None], {"a": 1}, {"": {}}, "../../etc/passwd", "<|im_end|>", "e8p", "llama", "{{ 1/0 }}",
    "{% for x in y %}",
]  # fmt: skip


def absurd(rng: random.Random) -> Any:
    """One of them, a fresh copy: it may be damaged further."""
    return copy.deepcopy(rng.choice(ABSURD))


def damage_bytes(rng: random.Random, raw: bytes) -> bytes:
    """Truncation, flipped bits, overwritten, removed, repeated or added ranges."""
    data = bytearray(raw)
    # Half of all damage goes to the front, where headers are.
    reach = len(data) if rng.random() < 0.5 else min(len(data), 4096)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(max(1, min(reach, len(data))))
        length = rng.choice((1, 1, 2, 4, 8, 64, 1000))
        kind = rng.randrange(7)
        if kind == 0:
            del data[at:]
        elif kind == 1 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at : at + length] = rng.randbytes(length)
        elif kind == 3:
            del data[at : at + length]
        elif kind == 4:
            data[at:at] = data[at : at + length]
        elif kind == 5:
            data[at : at + length] = rng.choice((b"\0", b"\xff", b"\x7f")) * length
        else:
            data += rng.randbytes(length)
    return bytes(data)


def damage_json(rng: random.Random, value: Any) -> Any:
    """A copy with one to three places replaced, removed, renamed or added."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 2, 3))):
        places: list[tuple[Any, Any]] = []
        collect(value, places)
        if not places:
            return absurd(rng)
        holder, key = rng.choice(places)
        kind = rng.randrange(5)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[rng.choice(("unknown", "", "rope_scaling", "quantization_config", "head_dim", "layers", "bits"))] = (
                absurd(rng)
            )
        elif kind == 2 and isinstance(holder, dict):
            holder[f"{key}x"] = holder.pop(key)
        elif kind == 3 and type(holder[key]) in (int, float):
            holder[key] = rng.choice(
                (-holder[key], holder[key] + 1, holder[key] * 2, holder[key] // 2, holder[key] * 1e9)
            )
        else:
            holder[key] = absurd(rng)
    return value


def collect(value: Any, places: list[tuple[Any, Any]]) -> None:
    """Every (container, key) in a JSON value; of long lists and vocabularies only some."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for key, child in items[:60]:
        places.append((value, key))
        collect(child, places)


def damage_file(rng: random.Random, file: Path) -> None:
    """JSON files half by meaning and half by bytes, others by bytes."""
    raw = file.read_bytes()
    if file.suffix == ".json" and rng.random() < 0.7:
        file.write_text(json.dumps(damage_json(rng, json.loads(raw))))
    else:
        file.write_bytes(damage_bytes(rng, raw))


def damage_header(rng: random.Random, file: Path) -> None:
    """A safetensors file whose JSON header says something else, with the right length in front."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.dumps(damage_json(rng, json.loads(raw[8 : 8 + length]))).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


def damage_tensors(rng: random.Random, file: Path) -> None:
    """A valid safetensors file that is not this model's: one tensor absent, renamed, reshaped, of another dtype, or
    holding values that no trained weight has."""
    tensors = load_file(file)
    name = rng.choice(sorted(tensors))
    tensor = tensors[name]
    wild = rng.choice((float("nan"), float("inf"), 6e4, -6e4, 1e-7, 0.0))

    def poke(t: torch.Tensor) -> torch.Tensor:
        t = t.clone()
        if t.is_floating_point():
            t.view(-1)[rng.randrange(t.numel())] = wild
        else:
            t.view(-1)[rng.randrange(t.numel())] = rng.randrange(128)
        return t

    changes: list[Callable[[torch.Tensor], torch.Tensor | None]] = [
        lambda t: None,
        lambda t: t.flatten(),
        lambda t: t.unsqueeze(0),
        lambda t: t[..., :-1] if t.dim() else t.reshape(1),
        lambda t: torch.cat([t, t]) if t.dim() else t.reshape(1, 1),
        lambda t: t.new_zeros(0),
        lambda t: t.to(rng.choice((torch.int8, torch.int64, torch.float64, torch.uint8, torch.bool))),
        lambda t: t.t() if t.dim() == 2 else t,
        lambda t: torch.full_like(t, wild) if t.is_floating_point() else torch.zeros_like(t),
        poke,
        poke,
    ]
    made = rng.choice(changes)(tensor)
    del tensors[name]
    if made is not None:
        tensors[name if rng.random() < 0.9 else name + "x"] = made.contiguous()
    if rng.random() < 0.1:
        tensors["extra"] = torch.ones(3)
    save_file(tensors, file)
