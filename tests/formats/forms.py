"""Every form of checkpoint that onegraph has written, as a tiny file each: tests/fixtures/forms.

A form that is there is never written again: it stands for the files that people have. A new one, or a new version of
one, is a function here, and `python -m forms NAME` (with src, tests and tests/formats on the path) writes it once.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onegraph.formats.checkpoint import CARD, Checkpoint, write_checkpoint
from onegraph.models.load import parse_config
from onegraph.models.loader import Loader
from onegraph.ops.weight import weight_ops

FOLDER = Path(__file__).parents[1] / "fixtures" / "forms"
HEADS = FOLDER.with_name("heads")  # draft heads, which belong to a model as `fuzz.tiny` writes it
DECODED = "decoded.json"  # of each weight, the SHA-256 of what it decodes to in float32
WORDS = 24
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
DEEPSEEK = {"hidden_size": 16, "moe_intermediate_size": 16, "num_hidden_layers": 2, "compress_ratios": [0, 4]}
DEEPSEEK |= {"n_routed_experts": 2, "num_hash_layers": 1, "index_n_heads": 2, "num_attention_heads": 2, "hc_mult": 2}


def decoded(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every weight of a checkpoint by name, in float32, as the codes say: experts of a stack one below the other."""
    cpu = torch.device("cpu")
    with Checkpoint.open(path) as checkpoint:
        loader = Loader(checkpoint, parse_config(checkpoint.config), torch.float32)
        loader.check()
        for layer in loader.layers():
            format, tensors = loader.weight(layer, cpu)
            yield layer, weight_ops(format).decode(format, tensors | format.constants(cpu))
        for name, stack in loader.parts.stacks.items():
            format, _ = loader.stack(name)
            ones = loader.matrices(name, cpu, stack.transposed)
            yield name, torch.cat([weight_ops(format).decode(format, one | format.constants(cpu)) for one in ones])
        for name in loader.parts.tensors:
            yield name, checkpoint.tensor(loader.stored[name])


def digests(path: Path) -> dict[str, str]:
    return {
        name: hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, t in decoded(path)
    }


def head_digests(path: Path, model: Path) -> dict[str, str]:
    """Of each tensor of a draft head as it runs beside `model` on a CPU, the SHA-256, by its name in the program."""
    from onegraph import LLM
    from onegraph.models.eagle import EagleHead

    with LLM(model, device="cpu", dtype="float32", max_model_len=64) as llm, Checkpoint.open(path) as checkpoint:
        head = EagleHead.load(checkpoint, llm.engine.model)
    own = [*head.named_parameters(), *head.named_buffers()]
    return {name: hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for name, t in own}


# -------------------------------------------------------------------------------------------------------------- writing


def llama(source: Path, out: Path, **options: Any) -> None:
    from models import save_hf
    from onegraph import quantize

    variant = options.pop("variant", "smollm2")
    save_hf(variant, source, **SIZES | options.pop("sizes", {}))
    words(source)
    text = " ".join(f"w{i}" for i in torch.randint(0, WORDS, (200,)).tolist())
    calibrated = {} if options.get("format") == "nvfp4" else {"calibration": text, "tokens": 64, "sequence": 64}
    quantize(source, out, recipe="quick", device="cpu", **calibrated | options)


def words(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))


def deepseek(source: Path, out: Path) -> None:
    from deepseek import save_hf
    from onegraph import quantize

    save_hf("flash", source, vocab_size=WORDS, **DEEPSEEK)
    words(source)
    quantize(source, out, format="nvfp4", device="cpu")


def gpt_oss(source: Path, out: Path) -> None:
    """Its experts as they are published, in MXFP4 blocks, which stay; the rest in codes."""
    from models import save_hf
    from onegraph import quantize

    dense = source.with_name("dense")
    save_hf("gpt_oss", dense, **SIZES | {"num_local_experts": 2, "num_experts_per_tok": 1, "hidden_size": 32})
    words(dense)
    with Checkpoint.open(dense) as checkpoint:
        tensors = {name: checkpoint.tensor(name) for name in checkpoint.names}
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            count, k, n = tensors.pop(name).shape
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (count, n, k // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(110, 130, (count, n, k // 32), dtype=torch.uint8)
        config = checkpoint.config | {"quantization_config": {"quant_method": "mxfp4"}}
        write_checkpoint(source, config, tensors.items(), copy_from=checkpoint)
    text = " ".join(f"w{i}" for i in range(WORDS)) * 9
    quantize(source, out, recipe="quick", device="cpu", calibration=text, tokens=64, sequence=64)


def mixed(bits: int, **options: Any) -> Callable[[Path, Path], None]:
    return lambda source, out: llama(source, out, bits=bits, **options)


FORMS: dict[str, Callable[[Path, Path], None]] = {
    "e8p-1": mixed(2, layers={"*.v_proj": 3, "*.down_proj": 4, "*.o_proj": 16}),
    "e8p-1-ends": mixed(3, lm_head=4, embed_tokens=2, variant="qwen2"),
    "e8p-1-experts": mixed(3, experts=2, variant="qwen3_moe", sizes={"num_experts": 3, "moe_intermediate_size": 16}),
    "e8p-1-mxfp4-experts": gpt_oss,
    "nvfp4-1": lambda source, out: llama(source, out, format="nvfp4"),
    "nvfp4-1-deepseek": deepseek,
}


def write(name: str) -> None:
    out = FOLDER / name
    if out.exists():
        raise SystemExit(f"{out}: is there already, and stands for the files that people have; give it a new name")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        FORMS[name](Path(folder) / "source", out)
    for file in (CARD, "tokenizer.json", "SHA256SUMS", "generation_config.json"):  # no part of the form
        (out / file).unlink(missing_ok=True)
    (out / DECODED).write_text(json.dumps(digests(out), indent=1) + "\n")


def write_head(name: str) -> None:
    from fuzz import tiny
    from onegraph.api.draft_head import train_head

    out = HEADS / name
    if out.exists():
        raise SystemExit(f"{out}: is there already, and stands for the files that people have; give it a new name")
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.write_model(Path(folder) / "model")
        train_head(
            model,
            out,
            texts=32,
            length=24,
            ahead=3,
            batch=8,
            device="cpu",
            vocabulary=100,
            minutes=1,
            steps=4,
            rate=3e-3,
        )
        for file in out.iterdir():
            if file.name not in ("config.json", "model.safetensors"):
                file.unlink()
        (out / DECODED).write_text(json.dumps(head_digests(out, model), indent=1) + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        (write_head if name.startswith("eagle") else write)(name)
