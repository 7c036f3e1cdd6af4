"""What `quantize --dry-run` says: sizes to the byte, and what is refused before anything is sampled or written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fuzz import tiny
from fuzz.run import invoke
from models import save_hf
from onegraph import plan, quantize
from onegraph.api import cost, resources
from onegraph.api import plan as planning
from onegraph.api.choices import TOKENS, choose
from onegraph.api.size import Size
from onegraph.formats.checkpoint import write_checkpoint

TEXT = "the thing in the inn, and a hat. " * 200
SMALL: dict[str, Any] = {"calibration": TEXT, "tokens": 256, "sequence": 64, "device": "cpu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("plan") / "plain")


MIXED = {"recipe": "quick", "bits": 3, "layers": {"*.down_proj": 4, "*.v_proj": 16, "model.layers.1.*": 2}}
FORMS: list[dict[str, Any]] = [
    {"recipe": "quick"},
    MIXED,
    {"recipe": "quick", "lm_head": 4},
    {"recipe": "quick", "bits": 2, "embed_tokens": 3},
    {"recipe": "quick", "lm_head": 2, "embed_tokens": 4},
    {"format": "nvfp4"},
    {"format": "nvfp4", "layers": {"*.o_proj": 16}},
]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(("directory", options) for options in FORMS),
        *((kind, options) for kind in ("gguf", "bias") for options in (MIXED, FORMS[4], FORMS[6])),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_sizes_are_those_that_are_written(model: Path, tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    source = model
    if kind == "gguf":
        source = tiny.write_gguf(tmp_path / "tiny.gguf")
    elif kind == "bias":
        save_hf("qwen2", tmp_path / "bias", vocab_size=len(tiny.TOKENS))
        source = tmp_path / "bias"
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (source / name).write_bytes((model / name).read_bytes())
    found = plan(source, tmp_path / "out", **(SMALL | options))
    assert not (tmp_path / "out").exists()
    made = quantize(source, tmp_path / "out", **(SMALL | options))
    assert (found.before, found.after) == (made.before, made.after)
    assert found.recipe == made.recipe
    assert found.disk >= sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")) * 0.8


def test_what_hf_quant_config_says_is_seen_without_weights(model: Path, tmp_path: Path) -> None:
    """As `quantize` sees it once they are there."""
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    plan(tmp_path, device="cpu")
    told = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match="is quantized already"):
        plan(tmp_path, device="cpu")


def test_patterns_are_counted(model: Path, tmp_path: Path) -> None:
    command = ["quantize", model, tmp_path / "out", "--dry-run", "--device", "cpu", "--layer", "*.down_proj=2"]
    command += ["--layer", "model.layers.1.self_attn.*=16"]
    status, out, errors = invoke(command)
    assert (status, errors) == (0, "")
    assert out.splitlines()[:2] == [
        "*.down_proj: 2 linears, model.layers.0.mlp.down_proj to model.layers.1.mlp.down_proj",
        "model.layers.1.self_attn.*: 4 linears, model.layers.1.self_attn.q_proj to model.layers.1.self_attn.o_proj",
    ]
    assert "weights in 10 linears (e8p, 4 bits, recipe quick, at most 24576 tokens of the bundled corpus) on cpu" in out
    assert re.search(r"estimated \d+ s from a probe, ", out)
    status, out, _ = invoke([*command, "--json"])
    told = json.loads(out)
    assert told["layers"] == {"*.down_proj": 2, "model.layers.1.self_attn.*": 4}
    assert told["after"]["linear_bits"] < told["before"]["linear_bits"] == 16
    assert not list(tmp_path.iterdir())


LLAMA = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "model_type": "llama",
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
LARGE = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}


def test_models_of_8b_and_70b_from_their_config_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters as Meta states them, 4.01 bits in the linears; more blocks take more time and no more memory."""
    monkeypatch.setattr(cost, "_timed", lambda run, device, probe: 3e-3)  # a machine of one speed
    found = {}
    for name, sizes in LARGE.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(LLAMA | sizes))
        found[name] = plan(tmp_path / name, device="cpu")
    assert found["8B"].before.parameters == 8_030_261_248
    assert found["70B"].before.parameters == 70_553_706_496
    for each in found.values():
        assert each.before.total_bytes == 2 * each.before.parameters
        assert 4 < each.after.linear_bits < 4.02
        assert each.memory < 4 * each.before.parameters / 2, "one block and its Hessians, not the model"
    assert 8 < found["70B"].seconds / found["8B"].seconds < 30
    on_gpu = str(replace(found["8B"], device="cuda"))
    assert re.search(r"\d+ min on an H200, ", on_gpu), "a GPU's rates of rounding were measured there"
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "config.json").write_text(json.dumps(LLAMA | LARGE["8B"] | {"num_hidden_layers": 8}))
    short = plan(tmp_path / "short", device="cpu")
    assert short.memory == found["8B"].memory
    everything = plan(tmp_path / "8B", device="cpu", calibration="self")
    assert everything.memory > 4 * everything.before.parameters
    assert everything.seconds > found["8B"].seconds


def test_defaults_follow_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = choose(device="cpu")
    assert (on_cpu.recipe, on_cpu.tokens, on_cpu.calibration) == ("quick", TOKENS["quick"], "bundled")
    monkeypatch.setattr("onegraph.api.choices.pick_device", lambda name: torch.device("cuda"))
    on_gpu = choose(device="auto")
    assert (on_gpu.recipe, on_gpu.tokens, on_gpu.calibration) == ("good", TOKENS["good"], "bundled")
    assert TOKENS["quick"] < TOKENS["good"] == TOKENS["best"] == choose(device="cpu", recipe="best").tokens
    assert choose(recipe="quick", num_calibration_tokens=100).recipe == "quick"
    assert choose(device="cpu", format="nvfp4").recipe == "good"


@pytest.mark.parametrize(
    ("tied", "rates", "said"),
    [
        (True, {"lm_head": 4}, "with lm_head in codes it is stored beside them; with embed_tokens in codes too"),
        (True, {"embed_tokens": 3}, "with embed_tokens in codes it is stored beside them; with lm_head in codes too"),
        (True, {"lm_head": 4, "embed_tokens": 4}, None),
        (True, {}, None),
        (False, {"lm_head": 4}, None),
    ],
)
def test_one_end_of_a_tied_pair_is_said_to_make_the_model_larger(
    tied: bool, rates: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | LARGE["8B"] | {"tie_word_embeddings": tied}))
    found = plan(tmp_path, device="cpu", **rates)
    assert len(found.notes) == (said is not None)
    assert found.as_dict()["notes"] == found.notes
    assert (said or "") in "".join(found.notes)


def test_who_is_refused_for_memory_is_told_what_would_do(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(**options: Any) -> str:
        with pytest.raises(ValueError, match="of memory on cpu and") as caught:
            plan(model, tmp_path / "out", device="cpu", **options)
        return str(caught.value)

    alone = plan(model, device="cpu", tokens=1 << 20).rounding
    monkeypatch.setattr(planning, "sampling_memory", lambda work, device: 1 << 40)
    monkeypatch.setattr(resources, "available_memory", lambda device: alone)
    assert "self_generate=False does without" in told(tokens=1 << 20, extend=True)
    assert "give a text" in told(tokens=1 << 20, calibration="self")
    monkeypatch.setattr(resources, "available_memory", lambda device: 1)
    for options in ({}, {"extend": True}):
        assert told(**options).endswith("ask for fewer tokens")
        assert told(recipe="good", **options).endswith("ask for fewer tokens, or recipe 'quick'")
        assert told(recipe="best", **options).endswith("choose 'good'")


def test_a_source_of_fewer_bits_is_told_in_16_too() -> None:
    sizes = {"linear_bytes": 1, "parameters": 134_500_000, "linear_parameters": 1}
    assert Size(total_bytes=269_000_000, **sizes).stored == "269.0 MB"
    assert Size(total_bytes=96_600_000, **sizes).stored == "96.6 MB (269.0 MB in 16 bits)"


def test_the_model_goes_on_with_a_text_only_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | LARGE["8B"]))
    monkeypatch.setattr("onegraph.api.choices.pick_device", torch.device)
    monkeypatch.setattr(planning, "estimate", lambda work, device: (1.0, 1))
    for options, extended in (({}, False), ({"extend": None}, False), ({"extend": True}, True)):
        found = plan(tmp_path, device="cuda", activations=0, **options)
        assert found.rounding == 1
        assert (found.extended, found.memory > 1) == (extended, extended), "what is written takes the whole model"


def test_tokens_of_each_source_are_counted_or_estimated(model: Path, tmp_path: Path) -> None:
    """A model without a tokenizer has estimates; both follow the weights."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("the hat\n" * 3000)
    options = SMALL | {"tokens": 8192, "calibration": {tmp_path / "a.txt": 0.75, tmp_path / "b.txt": 0.25}}
    wanted = {str(tmp_path / "a.txt"): 6144, str(tmp_path / "b.txt"): 2048}
    found = plan(model, **options)
    assert found.text == pytest.approx(wanted, abs=1600), "a document is 2,048 characters"
    assert found.text_lines[0].startswith("calibration: 8,192 tokens: ")
    assert found.text_lines[1].startswith("warning: 8,192 calibration tokens; the recipe takes 24,576, and with so few")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_bytes((model / "config.json").read_bytes())
    bare = plan(tmp_path / "m", **options)
    assert bare.text == pytest.approx(wanted | {str(tmp_path / "a.txt"): 6000}, rel=0.01), "24,000 bytes"
    assert any("has no tokenizer.json" in line for line in bare.text_lines)


def refused(
    says: str, model: Path, out: Path, capsys: pytest.CaptureFixture[str] | None = None, **options: Any
) -> None:
    """`plan` and `quantize` refuse alike, and neither leaves anything behind."""
    before = sorted(out.parent.iterdir()) if out.parent.is_dir() else []
    for act in (plan, quantize):
        with pytest.raises(ValueError, match=says) as caught:
            act(model, out, **({"device": "cpu"} | options))
        assert "\n" not in str(caught.value)
    assert before == (sorted(out.parent.iterdir()) if out.parent.is_dir() else [])


def test_nothing_is_sampled_for_a_command_that_cannot_end_well(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with calibration 'self', which would sample first."""
    monkeypatch.setattr("onegraph.api.quantize.sample_text", lambda *_: pytest.fail("it sampled"))
    sampled: dict[str, Any] = {"calibration": "self"}
    refused("matches no linear", model, tmp_path / "out", layers={"*.w_proj": 2}, **sampled)
    refused("exists already", model, tmp_path, **sampled)
    (tmp_path / "file").write_text("x")
    refused(r"file is no directory", model, tmp_path / "file" / "out", **sampled)
    monkeypatch.setattr(resources.os, "access", lambda *_: False)  # who runs as root may write anywhere
    refused("cannot be written to", model, tmp_path / "out", **sampled)
    monkeypatch.undo()
    monkeypatch.setattr("onegraph.api.quantize.sample_text", lambda *_: pytest.fail("it sampled"))
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda _: SimpleNamespace(free=50_000))
    refused(r"needs 1\d\d\.\d kB of this disk and 50\.0 kB are free", model, tmp_path / "out", **sampled)
    monkeypatch.undo()
    monkeypatch.setattr(resources, "available_memory", lambda _: 400_000)
    refused(r"ask for fewer tokens", model, tmp_path / "out", **sampled)
    refused(r"takes at least .* of memory on cpu and 400\.0 kB are free", model, tmp_path / "out", calibration=TEXT)


def test_activations_of_a_killed_job_count_as_free(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    stale = tmp_path / "out.partial" / ".activations.tmp"
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda _: SimpleNamespace(free=plan(model, **SMALL).disk - 8))
    with pytest.raises(ValueError, match="of this disk and"):
        plan(model, out, **SMALL)
    stale.mkdir(parents=True)
    (stale / "0").write_bytes(bytes(8))
    plan(model, out, **SMALL)
    monkeypatch.undo()
    quantize(model, out, **SMALL)
    assert not stale.exists()


def test_pieces_of_a_killed_job_need_no_second_room(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, folder = tmp_path / "out", tmp_path / "out.partial"
    whole = plan(model, **SMALL)
    kept = whole.disk - whole.after.total_bytes
    folder.mkdir()
    for size, free, enough in ((kept - 1, whole.disk - kept, False), (kept, whole.disk - kept, True)):
        (folder / "fisher-00000.safetensors").write_bytes(bytes(size))
        monkeypatch.setattr(resources.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        if enough:
            plan(model, out, **SMALL)
        else:
            with pytest.raises(ValueError, match="of this disk and"):
                plan(model, out, **SMALL)
    (folder / "fisher-00000.safetensors").write_bytes(bytes(10 * whole.disk))  # the result needs its own
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda _: SimpleNamespace(free=whole.after.total_bytes - 1))
    with pytest.raises(ValueError, match="of this disk and"):
        plan(model, out, **SMALL)


def test_available_memory_heeds_the_limits_of_the_process() -> None:
    code = "import resource, sys, torch; from onegraph.api.cost import available_memory as free\n"
    code += "resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, -1)); print(free(torch.device('cpu')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert 1 << 30 < int(done.stdout) < 3 << 30, done.stderr
    assert cost.available_memory(torch.device("cpu")) > 0


def test_what_it_takes_is_said_before_it_begins(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    command = ["quantize", model, tmp_path / "out", "--calibration", tmp_path / "text", "--device", "cpu"]
    status, _, errors = invoke([*command, "--num-calibration-tokens", 256, "--calibration-seq-len", 64])
    assert status == 0
    first = errors.splitlines()[0]
    assert first.startswith(
        "quantizing 0.07373M weights in 14 linears (e8p, 4 bits, recipe quick, at most 256 tokens of"
    )
    assert "kB of disk" in first


def test_a_text_shorter_than_a_row_is_refused_before_it_begins(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("é" * 31)
    says = "calibration: the text has 62 bytes, fewer than the 64 tokens of one sequence"
    for text in (tmp_path / "text", "é" * 31):
        with pytest.raises(ValueError, match=says):
            plan(model, **SMALL | {"calibration": text})
    assert plan(model, **SMALL | {"calibration": "é" * 32}).tokens == 256
    command = [
        "quantize",
        model,
        tmp_path / "out",
        "--dry-run",
        "--calibration-seq-len",
        64,
        "--device",
        "cpu",
        "--calibration",
    ]
    status, _, errors = invoke([*command, tmp_path / "text"])
    assert (status, errors) == (
        2,
        f"onegraph: error: --{says}; give about 4000 tokens or more, or use shorter sequences\n",
    )
    status, _, errors = invoke([*command, tmp_path / "none"])
    assert (status, errors) == (2, f"onegraph: error: {tmp_path / 'none'}: no such file\n")


def test_a_text_that_cannot_be_read_is_refused_before_it_begins(model: Path, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9 " * 1000)
    (tmp_path / "empty").mkdir()
    for path, says in (
        (tmp_path / "none", "no such file"),
        (tmp_path / "empty", "holds no UTF-8 text file"),
        (tmp_path / "latin", "not UTF-8 text"),
    ):
        for call in (lambda **options: plan(model, **options), lambda **o: quantize(model, tmp_path / "out", **o)):
            with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: {says}"):
                call(**SMALL | {"calibration": path})
    assert plan(model, format="nvfp4", calibration=tmp_path / "none", device="cpu").tokens is None, "it reads no text"


def test_bits_and_size_are_one_or_the_other(model: Path, tmp_path: Path) -> None:
    """Also where the bits are those of the default."""
    for bits in (4, 3, 2.5):
        with pytest.raises(ValueError, match=f"bits and size: got {bits} and 100000000, which are two budgets"):
            plan(model, **SMALL | {"bits": bits, "size": 100_000_000})
        status, _, errors = invoke(
            ["quantize", model, tmp_path / "out", "--bits", bits, "--size", "100MB", "--dry-run"]
        )
        assert status == 2
        assert "--size: not allowed with argument --bits" in errors
    assert plan(model, **SMALL).bits == plan(model, **SMALL | {"bits": 4}).bits == 4


def test_a_corrected_command_samples_no_second_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onegraph.api import quantize as module
    from onegraph.quant.resumable import ResumableWork

    options: dict[str, Any] = {"calibration": "self", "tokens": 128, "sequence": 64, "device": "cpu"}
    save, pieces = ResumableWork.save, []

    def stop(self: ResumableWork, name: str, *rest: Any) -> None:
        save(self, name, *rest)
        pieces.append(name)
        if name == "block-00000":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ResumableWork, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize(model, tmp_path / "out", **options)
    assert pieces == ["text", "inputs-00000", "block-00000"]
    whole = quantize(model, tmp_path / "whole", layers={"*.down_proj": 2}, **options)
    monkeypatch.setattr(module, "sample_text", lambda *_: pytest.fail("it sampled again"))
    said: list[str] = []
    made = quantize(model, tmp_path / "out", layers={"*.down_proj": 2}, remark=said.append, **options)
    assert said[1] == (
        f"{tmp_path / 'out'}.partial: keeps the sampled text, the Hessians of 1 block and drops 1 block, which this "
        "command asks for otherwise"
    )
    assert made.config == whole.config
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "whole"))
    assert one == two
    assert not list(tmp_path.glob("*.partial"))


def test_two_runs_into_one_directory(model: Path, tmp_path: Path) -> None:
    from onegraph.quant.resumable import ResumableWork

    with ResumableWork(tmp_path / "out.partial", "another"):
        for more in ({}, {"format": "nvfp4"}):
            with pytest.raises(ValueError, match=rf"process {os.getpid()} on .* works there; wait until it has ended"):
                quantize(model, tmp_path / "out", device="cpu", **more)
    assert not (tmp_path / "out").exists()


LIMITED = """
import functools, resource, sys
import torch
from onegraph.api import quantize as api
from onegraph.formats import checkpoint
from onegraph.formats.e8p import E8P
from onegraph.quant import quantize as driver

def rounded(weights, h, bits, recipe, source):  # as large as the real thing, without its minutes on a CPU
    shapes = [E8P[rate].layout(*w.shape) for w, rate in zip(weights, bits)]
    return [{key: torch.ones(shape).to(dtype) for key, (shape, dtype) in layer.items()} for layer in shapes]

driver.quantize_group = rounded
driver.dequantize = lambda tensors, bits, name: torch.ones(len(tensors["codes"]), 8 * tensors["codes"].shape[1])
api.write_checkpoint = functools.partial(checkpoint.write_checkpoint, shard_bytes=2 << 20)
model, out, headroom, kept = sys.argv[1:]
if kept == "memory":
    driver.Layers.__init__ = lambda self, partial, begin=driver.Layers.__init__: begin(self, None)
text = "the thing in the inn, and a hat. " * 20
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (1024 * used + int(headroom), -1))
api.check_resources = lambda found, out: None  # it would refuse, since what it counts on is not known to the byte
try:
    api.quantize(model, out, calibration=text, tokens=128, sequence=64, recipe="quick", device="cpu")
except (MemoryError, RuntimeError, OSError, ValueError) as error:
    sys.exit(3 if "memory" in repr(error).lower() else repr(error))
"""


def test_a_head_beside_tied_embeddings_is_planned_as_it_is_written(tmp_path: Path) -> None:
    """What would be written is a table without files: no head can be read from it."""
    head = {"lm_head.weight": torch.randn(len(tiny.TOKENS), 64).half()}
    write_checkpoint(tmp_path / "m", tiny.CONFIG, (tiny.tensors() | head).items())
    tiny.write_tokenizer(tmp_path / "m")
    with pytest.warns(UserWarning, match=r"the file's head is used"):
        said, made = plan(tmp_path / "m", **SMALL), quantize(tmp_path / "m", tmp_path / "out", **SMALL)
    assert said.after.total_bytes == made.after.total_bytes > 2 * len(tiny.TOKENS) * 64 * 2


@pytest.mark.slow
def test_memory_holds_one_block(tmp_path: Path) -> None:
    """A model whose linears take 168 MB in float32 and 19 MB in codes, under a limit of 30 MB beyond what the process
    has when it begins, of which a block and its Hessians take some 20; with the codes of finished blocks in memory it
    does not end."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 64, "head_dim": 64}
    config = tiny.CONFIG | sizes
    tensors = {
        "model.embed_tokens.weight": torch.randn(len(tiny.TOKENS), 256) * 0.1,
        "model.norm.weight": torch.ones(256),
    }
    shapes = {"self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256), "self_attn.v_proj": (128, 256)}
    shapes |= {"self_attn.o_proj": (256, 256), "mlp.gate_proj": (512, 256), "mlp.up_proj": (512, 256)}
    for i in range(64):
        for name, (n, k) in (shapes | {"mlp.down_proj": (256, 512)}).items():
            tensors[f"model.layers.{i}.{name}.weight"] = torch.randn(n, k) * k**-0.5
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = torch.ones(256)
    write_checkpoint(tmp_path / "m", config, ((k, v.half()) for k, v in tensors.items()), shard_bytes=4 << 20)
    tiny.write_tokenizer(tmp_path / "m")

    def run(kept: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", LIMITED, str(tmp_path / "m"), str(tmp_path / kept), str(HEADROOM), kept]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        return subprocess.run(words, capture_output=True, text=True, timeout=500, env=environment)

    done = run("disk")
    assert done.returncode == 0, done.stderr[-2000:]
    assert sum(file.stat().st_size for file in (tmp_path / "disk").glob("*.safetensors")) > 18e6
    starved = run("memory")
    assert starved.returncode == 3 or "memory allocation of" in starved.stderr, "Rust aborts, in safetensors"


HEADROOM = 30 << 20
