"""Whether a TurboQuant cache costs on a GPU what it costs on a CPU: real weights, cut so that they travel in 14 MB.

    python benchmarks/turboquant_cut.py pack MODEL TEXT cut.npz       # the first layers, the words of the text
    PYTHONPATH=src python3 benchmarks/turboquant_cut.py run cut.npz cpu float32 > lines.jsonl
    PYTHONPATH=src python3 benchmarks/turboquant_cut.py run cut.npz cuda float32 bfloat16 >> lines.jsonl

What is left is no language model: its perplexity says nothing, KL and top-1 against its own exact attention do. Weights
are rounded to 4 bits, 32 to a scale and a minimum. --at-once 8 reads the text through the kernels of a decode step.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from onegraph.api.tokenizer import Tokenizer
from onegraph.engine.evaluate import evaluate
from onegraph.engine.record import emit, machine
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.turboquant import parse_kv
from onegraph.models.llama import Llama
from onegraph.nn import turboquant

GROUP = 32  # weights that share a scale and a minimum
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LINEARS += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
SETTINGS = ("turboquant:4", "turboquant:4,mode=full", "turboquant:k3v4", "turboquant:3", "turboquant:2")
SETTINGS += ("turboquant:4,keys=prod",)


def pack(model: str, text: str, to: str, layers: int, tokens: int) -> None:
    with Checkpoint.open(model) as c:
        ids = torch.tensor(Tokenizer(c).encode(Path(text).read_text())[:tokens])
        kept, mapped = ids.unique(return_inverse=True)
        held = {"ids": mapped.int().numpy()}
        held["embed"] = c.tensor("model.embed_tokens.weight", dtype=torch.float32)[kept].half().numpy()
        for name in (f"model.layers.{i}.{linear}" for i in range(layers) for linear in LINEARS):
            weight = c.tensor(f"{name}.weight", dtype=torch.float32)
            low, high = weight.view(-1, GROUP).aminmax(dim=1)
            minimum, scale = low.half(), ((high - low.half().float()) / 15).half()
            code = (weight.view(-1, GROUP) - minimum.float()[:, None]) / scale.float().clamp_min(1e-8)[:, None]
            code = code.round().clamp(0, 15).to(torch.uint8)
            held[f"{name}.codes"] = (code[:, ::2] | code[:, 1::2] << 4).numpy()
            held |= {f"{name}.scale": scale.numpy(), f"{name}.minimum": minimum.numpy()}
            held[f"{name}.shape"] = np.array(weight.shape)
        norms = [f"model.layers.{i}.{k}_layernorm" for i in range(layers) for k in ("input", "post_attention")]
        held |= {f"{n}.weight": c.tensor(f"{n}.weight", dtype=torch.float32).numpy() for n in [*norms, "model.norm"]}
        config = {key: value for key, value in c.config.items() if key != "quantization_config"}
        config |= {"num_hidden_layers": layers, "vocab_size": len(kept), "dtype": "float32"}
    np.savez(to, config=np.array(json.dumps(config)), **held)


def unpack(path: str, to: Path) -> torch.Tensor:
    """A checkpoint of float32 weights in the directory `to`; returns the text's tokens."""
    held = np.load(path)
    weights = {n: torch.from_numpy(held[n]) for n in held.files if n.endswith("norm.weight")}
    weights["model.embed_tokens.weight"] = torch.from_numpy(held["embed"]).float()
    for name in (n.removesuffix(".codes") for n in held.files if n.endswith(".codes")):
        codes, scale, minimum = (torch.from_numpy(held[f"{name}.{part}"]) for part in ("codes", "scale", "minimum"))
        flat = torch.stack((codes & 15, codes >> 4), -1).flatten(1).float() * scale.float()[:, None]
        weights[f"{name}.weight"] = (flat + minimum.float()[:, None]).view(*held[f"{name}.shape"])
    save_file(weights, to / "model.safetensors")
    (to / "config.json").write_text(str(held["config"]))
    return torch.from_numpy(held["ids"]).long()


def run(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    turboquant.AT_ONCE = args.at_once
    about: dict[str, Any] = {"bench": "turboquant quality, cut", "at_once": args.at_once, "window": args.window}
    with tempfile.TemporaryDirectory() as folder:
        ids = unpack(args.file, Path(folder))
        for dtype in args.dtypes:
            with Checkpoint.open(folder) as checkpoint:
                model = Llama.load(checkpoint, device, getattr(torch, dtype), max_context=args.window)
            for kv in args.settings:
                started = time.monotonic()
                row = evaluate(model, ids, window=args.window, batch=4, kv=parse_kv(kv)).as_dict()
                row |= {"kv": kv, "dtype": dtype, "layers": model.config.layers, "vocabulary": model.config.vocab_size}
                emit(about | row | {"seconds": round(time.monotonic() - started, 1)} | machine(device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("model")
    packing.add_argument("text")
    packing.add_argument("file")
    packing.add_argument("--layers", type=int, default=6)
    packing.add_argument("--tokens", type=int, default=4096)
    running = commands.add_parser("run")
    running.add_argument("file")
    running.add_argument("device")
    running.add_argument("dtypes", nargs="+")
    running.add_argument("--window", type=int, default=1024)
    running.add_argument("--at-once", type=int, default=512, help="queries that are read at once")
    running.add_argument("--settings", nargs="*", default=list(SETTINGS))
    args = parser.parse_args()
    if args.what == "pack":
        pack(args.model, args.text, args.file, args.layers, args.tokens)
    else:
        run(args)


if __name__ == "__main__":
    main()
