"""Models of transformers as they are, tiny and with random weights: code that nobody wrote for this checker.

python tests/check/zoo.py --measure zoo.json      # on a GPU: what torch alone does with each, without onegraph.check
python tests/check/zoo.py --truth zoo.json        # anywhere: the simulation's verdicts against it
"""

import argparse
import contextlib
import io
import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import lanes

TRUTH = Path(__file__).parent / "zoo.json"
_SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_local_experts": 4,
            "n_routed_experts": 4, "shared_expert_intermediate_size": 32}  # fmt: skip
_IMAGE = {"image_size": 32, "patch_size": 8, "num_channels": 3}
ENCODERS: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16}, "bert": {}, "big_bird": {"attention_type": "original_full"}, "camembert": {},
    "convbert": {"embedding_size": 16}, "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}, "electra": {"embedding_size": 16},
    "ernie": {}, "esm": {"position_embedding_type": "rotary", "mask_token_id": 3}, "fnet": {}, "ibert": {},
    "longformer": {"attention_window": 4}, "megatron-bert": {}, "modernbert": {}, "mpnet": {},
    "roformer": {"embedding_size": 16},
    "squeezebert": {"embedding_size": 32}, "xlm-roberta": {},
}  # fmt: skip
DECODERS: dict[str, dict[str, Any]] = {
    "cohere": {}, "gemma": {},
    "gemma2": {}, "gemma3_text": {}, "glm4": {}, "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4}, "gpt_neox": {},
    "gpt_oss": _EXPERTS, "granitemoe": _EXPERTS, "lfm2": {}, "mamba": {"state_size": 4}, "mistral": {},
    "mixtral": _EXPERTS, "nemotron": {}, "olmoe": _EXPERTS, "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "phi": {}, "phi3": {}, "qwen2_moe": _EXPERTS, "qwen3": {}, "qwen3_moe": _EXPERTS, "stablelm": {}, "starcoder2": {},
}  # fmt: skip
VISION: dict[str, dict[str, Any]] = {
    "beit": {}, "convnext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}, "deit": {}, "dinov2": {},
    "poolformer": {}, "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "siglip_vision_model": {},
    "vit": {}, "vit_mae": {},
}  # fmt: skip
NAMES = [*ENCODERS, *DECODERS, *VISION]
_MORE_ENCODERS = [
    "canine", "data2vec-text", "eurobert", "flaubert", "mobilebert", "mra", "nystromformer", "rembert", "roberta",
    "roberta-prelayernorm", "splinter", "tapas", "visual_bert", "xlm", "xmod", "yoso",
]  # fmt: skip
_MORE_DECODERS = [
    "apertus", "arcee", "biogpt", "cohere2", "ernie4_5", "ernie4_5_moe", "exaone4", "falcon_mamba", "flex_olmo",
    "glm", "glm4_moe", "granite", "helium", "hunyuan_v1_dense", "jetmoe", "ministral", "nanochat", "olmo",
    "olmo2", "olmo3", "persimmon", "phimoe", "qwen2", "seed_oss", "smollm3", "vaultgemma", "xglm",
]  # fmt: skip
_MORE_VISION = [
    "data2vec-vision", "dinov2_with_registers", "dinov3_vit", "ijepa", "mobilenet_v2", "vit_msn",
]  # fmt: skip
MORE = [*_MORE_ENCODERS, *_MORE_DECODERS, *_MORE_VISION]
"""A second set, chosen by what runs at this size on a CPU before the checker had seen any of them."""
ENCODERS |= {name: {} for name in _MORE_ENCODERS}
DECODERS |= dict.fromkeys(_MORE_DECODERS, _EXPERTS)
VISION |= {name: {} for name in _MORE_VISION}


def factory(name: str) -> Any:
    """(step, inputs) of one model: a text encoder, one decoded token over a static cache, or an image encoder."""
    import transformers

    torch.manual_seed(0)
    own = ENCODERS.get(name) or DECODERS.get(name) or VISION.get(name) or {}
    small = {**_SMALL, **(_IMAGE if name in VISION else {}), **own}
    config = transformers.AutoConfig.for_model(name, **small)
    auto = transformers.AutoModelForCausalLM if name in DECODERS else transformers.AutoModel
    model = auto.from_config(config).to("cuda").eval()
    if name in DECODERS:
        cache = transformers.StaticCache(config=config, max_cache_len=32)

        @torch.no_grad()
        def decode(token, position):
            if name == "mamba":
                return model(token, use_cache=False).logits
            return model(token, past_key_values=cache, position_ids=position[None], use_cache=True).logits

        return decode, lambda i: (torch.tensor([[i + 3]], device="cuda"), torch.tensor([i], device="cuda"))

    @torch.no_grad()
    def encode(*inputs):
        return model(*inputs)[0]

    def text(i):
        ids = torch.arange(24).view(2, 12).add(i).remainder(60).add(3)
        return ids.to("cuda"), torch.arange(12).lt(torch.tensor([[12], [6 + i % 4]])).long().to("cuda")

    def image(i):
        return (torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(i)).to("cuda"),)

    return encode, image if name in VISION else text


def measure(name: str) -> dict[str, Any]:
    """What torch alone does: the row that measure_truth gives."""
    import measure_truth

    warnings.filterwarnings("ignore")
    case = SimpleNamespace(factory=lambda: factory(name), gpus=1)
    try:
        eager = measure_truth._eager(torch, case)
    except Exception as error:
        return {"eager": measure_truth._line(error)}
    try:
        return {"eager": "ok", **measure_truth._captured(torch, case, eager)}
    except Exception as error:
        return {"eager": "ok", "capture": "ok", "replay": measure_truth._line(error)}


def _measured(name: str) -> dict[str, Any]:
    return {"row": measure(name), "device": torch.cuda.get_device_name(0)}


def look(name: str, live: bool) -> dict[str, Any]:
    """What the check says: {"errors": [[code, [file, line], ...], ...]} or {"error": why it could not run}."""
    from measure_truth import short

    from onegraph.check import CheckError
    from onegraph.check.causes import mark_consequences
    from onegraph.check.live import live_step
    from onegraph.check.simulate.run import simulate_step

    warnings.filterwarnings("ignore")
    run = live_step if live else simulate_step  # each line of transformers, not the call that leads to it
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            report = mark_consequences(run(lambda: factory(name)))
    except CheckError as error:
        return {"error": str(error)}
    chains = [[f.code, *([short(c.path), c.line] for c in (*f.calls, f))] for f in report.errors]
    return {"errors": chains, "findings": len(report.findings)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", default="", help="run each on the GPU and write what happened here")
    parser.add_argument("--truth", default=str(TRUTH))
    parser.add_argument("--live", action="store_true", help="the verdicts of a capture on the GPU instead")
    parser.add_argument("--save", default="", help="write the findings here, as they come")
    parser.add_argument("--load", default="", help="findings saved before, instead of looking")
    parser.add_argument("--names", nargs="+", default=NAMES)
    parser.add_argument(
        "--more", action="store_true", help="the models of the second set (--truth tests/check/zoo2.json)"
    )
    parser.add_argument("--out", type=Path, help="append the score to benchmarks/results/check-accuracy.jsonl, say")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    import transformers  # once, before the fork
    from accuracy import _fit, bad

    from onegraph.engine.record import emit, machine

    if arguments.more:
        arguments.names = MORE
    tasks = [(name,) for name in arguments.names]
    if arguments.measure:
        rows: dict[str, Any] = {}
        body: dict[str, Any] = {"command": "python tests/check/zoo.py --measure tests/check/zoo.json", "models": rows,
                                "torch": torch.__version__, "transformers": transformers.__version__}  # fmt: skip
        for (name,), answer in lanes.answers(_measured, tasks, workers=arguments.workers, fit=_fit):
            rows[name] = answer.get("row", {"eager": "ok", "capture": answer.get("error"), "replay": ""})
            body["device"] = answer.get("device", body.get("device"))
            Path(arguments.measure).write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
        return
    seen: dict[str, Any] = json.loads(Path(arguments.load).read_text()) if arguments.load else {}
    tasks = [] if arguments.load else [(name, arguments.live) for name in arguments.names]
    for (name, _), answer in lanes.answers(look, tasks, workers=arguments.workers, fit=_fit):
        seen[name] = answer
        if arguments.save:
            Path(arguments.save).write_text(json.dumps(seen, indent=0, sort_keys=True))
    truth = json.loads(Path(arguments.truth).read_text())["models"] if Path(arguments.truth).is_file() else {}
    known = [n for n in seen if truth.get(n, {}).get("eager") == "ok"]
    wrong = [n for n in known if seen[n].get("errors") and not bad(truth[n])]
    missed = [n for n in known if not seen[n].get("errors") and bad(truth[n])]
    told = [n for n in known if seen[n].get("errors")]
    lines = [n for n in told if truth[n].get("at")]
    right = [n for n in lines if truth[n]["at"][-1] in [places[-1] for _, *places in seen[n]["errors"]]]
    faulty = sum(bad(truth[n]) for n in known)
    row = {
        "bench": "check-accuracy",
        "cases": "models2" if arguments.more else "models",
        "way": "live" if arguments.live else "simulate",
        "run": "now",
        "bad_cases": faulty,
        "recall": round(1 - len(missed) / max(faulty, 1), 3),
        "error_findings": len(told),
        "precision": round(1 - len(wrong) / max(len(told), 1), 3),
        "models": len(known),
        "failing_lines": len(lines),
        "lines_told": len(right),
        "wrong": [*wrong, *(f"{name}: missed" for name in missed)],
    }
    emit(row | machine("cuda" if arguments.live else "cpu"), arguments.out)
    for name in sorted({*wrong, *missed, *(set(lines) - set(right))}):
        print(name, truth[name], json.dumps(seen[name])[:400])


if __name__ == "__main__":
    main()
