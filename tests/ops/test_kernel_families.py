"""`ONEGRAPH_KERNELS`, and what `onegraph env` says of it: which family of kernels an op runs on a GPU, and why."""

import os
import subprocess
import sys
from typing import get_args

import pytest
import torch

from onegraph.cli import env
from onegraph.ops import choices, family
from onegraph.ops.cuda import build, exchange


def _python(code: str, kernels: str) -> subprocess.CompletedProcess:
    environment = os.environ | {family.VARIABLE: kernels, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An RTX 4090, whose driver says nothing."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
    monkeypatch.setattr(build, "device", lambda index: None)
    monkeypatch.setattr(family, "FORCED", None)


def _chosen() -> dict[str, choices.Choice]:
    return {choice.op: choice for choice in choices.choices(0)}


def test_every_source_says_which_ops_run_it() -> None:
    ops = set(choices.registered())
    for source in choices.sources():
        assert set(source.ops) <= ops, source.path.name
        assert bool(source.ops) == bool(source.families), source.path.name
    cuda = {name for name, op in choices.registered().items() if (op.kernel or "").startswith("onegraph.ops.cuda.")}
    assert cuda <= {op for source in choices.sources() for op in source.ops}


@pytest.mark.usefixtures("gpu")
def test_a_card_without_clusters_gets_portable_kernels_where_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _chosen()
    linear = found["e8p_linear"]
    assert (linear.family, set(linear.sources)) == ("portable", {"e8p_dequantize.cu", "e8p_portable.cu"})
    assert linear.refused["e8p_decode.cu"].startswith("it is written for compute capability 9.0")
    assert linear.refused["e8p_decode.cu"].endswith("this GPU has 8.9")
    assert found["paged_decode"].sources == ("decode_portable.cu", "decode_round.cu")
    assert found["nvfp4_linear"].sources == ("nvfp4.cu", "nvfp4_dequantize.cu", "nvfp4_short.cu")
    assert set(found["nvfp4_linear"].refused) == {"nvfp4_one.cu"}
    for op in (
        "sample",
        "e8p_experts",
        "fp8_linear",
        "turboquant_attention",
        "turboquant_hybrid",
        "turboquant_write",
        "int4_linear",
        "mxfp4_experts",
    ):
        assert found[op].family == "portable", op
    assert found["rms_norm"] == choices.Choice("rms_norm", "triton")
    assert found["routed_experts"] == choices.Choice("routed_experts", "reference")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (10, 0))
    blackwell = _chosen()["e8p_linear"]  # wgmma's kernels are not for it
    assert blackwell.family == "hopper"
    assert set(blackwell.sources) == {"e8p_decode.cu", "e8p_dequantize.cu", "e8p_portable.cu"}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    hopper = _chosen()["e8p_linear"]
    assert (hopper.family, len(hopper.sources), hopper.refused) == ("hopper", 4, {})


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("capability", [(12, 0), (12, 1)])
def test_a_card_of_12_is_told_the_family_of_what_few_tokens_run(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    found = _chosen()
    for op in ("e8p_linear", "int4_linear", "nvfp4_linear", "mxfp4_linear", "paged_decode", "e8p_experts", "sample"):
        assert found[op].family == "portable", op
    assert found["fp8_linear"].family == "hopper"  # whose one form is Hopper's there
    for op, choice in found.items():
        forms = {source.form(capability).portable for source in choices.sources() if source.path.name in choice.sources}
        assert len(forms) < 2, op  # of an op that mixed them, one word would be wrong of some calls


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("forced", "linear", "attention", "norm"),
    [
        ("portable", "portable", "portable", "triton"),
        ("hopper", "triton", "triton", "triton"),  # which has none for such a card
        ("triton", "triton", "triton", "triton"),
        ("reference", "reference", "reference", "reference"),
    ],
)
def test_what_is_forced_is_what_ops_run(
    forced: str, linear: str, attention: str, norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(family, "FORCED", forced)
    found = _chosen()
    assert [found[op].family for op in ("e8p_linear", "paged_decode", "rms_norm")] == [linear, attention, norm]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("forced", [None, *get_args(family.Family)])
@pytest.mark.parametrize(("capability", "form"), [((8, 9), "portable"), ((9, 0), "hopper")])
def test_gpus_hand_each_other_sums_whatever_is_forced(
    capability: tuple[int, int], form: str, forced: family.Family | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no other kernel for it, and the reference asks the host, which a graph cannot."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(family, "FORCED", forced)
    form = "portable" if forced == "portable" else form
    for op in ("all_gather", "all_reduce"):
        choice = _chosen()[op]
        assert (choice.family, choice.sources, choice.refused, choice.only) == (form, ("exchange.cu",), {}, True)
    assert not exchange.KERNEL.unavailable_reason(0)
    lines, only = env.kernels(0), "all_gather, all_reduce, e8p_all_reduce, expert_cache"
    if capability == (9, 0) and forced in (None, "hopper"):
        assert f"cuda:0 {form} only: {only}, hyper_all_reduce" in lines
    else:  # DeepSeek's in a launch of its own, in front of another family's
        assert f"cuda:0 {form} only: {only}" in lines
        assert any(line.startswith(f"cuda:0 {form}: ") and "hyper_all_reduce (exchange.cu)" in line for line in lines)


def test_ops_and_sources_agree_on_what_has_no_other_kernel() -> None:
    of_sources = {op for source in choices.sources() if source.sole for op in source.ops}
    assert (
        of_sources
        == {name for name, op in choices.registered().items() if op.sole}
        == {
            "all_gather",
            "all_reduce",
            "e8p_all_reduce",
            "expert_cache",
            "hyper_all_reduce",
        }
    )


@pytest.mark.usefixtures("gpu")
def test_without_a_compiler_nothing_of_cuda_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int) -> None:
        raise build.BuildError("no NVRTC here")

    monkeypatch.setattr(build, "device", refuse)
    linear = _chosen()["e8p_linear"]
    assert (linear.family, linear.refused["e8p_portable.cu"]) == ("triton", "no NVRTC here")
    assert "cuda:0 none: all_gather, all_reduce, e8p_all_reduce, expert_cache, hyper_all_reduce" in env.kernels(0)


@pytest.mark.usefixtures("gpu")
def test_env_names_families_and_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = env.kernels(3)
    assert lines[0].startswith("cuda:3 portable: ")
    assert "e8p_chain (e8p_portable.cu), e8p_experts, e8p_linear (e8p_dequantize.cu, e8p_portable.cu), fp8_" in lines[0]
    assert [line.split(":")[1].partition(" ")[2] for line in lines[:4]] == [
        "portable", "triton", "portable only", "triton only",
    ]  # fmt: skip
    assert any(
        line.startswith(
            "cuda:3 not e8p_batch.cu, e8p_prefill.cu: it is written for compute capability 9.0; this GPU has"
        )
        for line in lines
    )
    monkeypatch.setattr(family, "FORCED", "reference")
    behind, sole, only, *rest = env.kernels(0)
    assert behind == "cuda:0 portable: hyper_all_reduce (exchange.cu)"
    assert sole == "cuda:0 portable only: all_gather, all_reduce, e8p_all_reduce, expert_cache"
    assert only.startswith("cuda:0 reference only: ")
    assert set(only.split(": ")[1].split(", ")) >= {"add_rms_norm", "e8p_linear", "sample"}
    assert rest == ["cuda:0 not deepseek_hyper_ranks.cu: ONEGRAPH_KERNELS is reference"]


def test_the_variable_is_read_at_import_and_reference_registers_references() -> None:
    code = (
        "from onegraph.ops import registry\n"
        "targets = []\n"
        "registry._lazy = lambda target: targets.append(target) or (lambda *a: None)\n"
        "import onegraph.ops.norm, onegraph.ops.e8p, onegraph.ops.exchange\n"
        "print(registry.family.FORCED, [target for target in targets if '.cpu' not in target])"
    )
    assert _python(code, "reference").stdout.strip() == (
        "reference ['onegraph.ops.cuda.exchange:all_reduce', 'onegraph.ops.cuda.exchange:all_gather']"
    )
    assert family.FORCED is None


def test_a_family_that_there_is_not_is_an_error_in_one_line() -> None:
    done = _python("from onegraph.cli import main; raise SystemExit(main(['env']))", "fast")
    assert done.returncode == 2
    told = "allowed: hopper, portable, triton, reference, or unset for the best there is"
    assert done.stderr.strip() == f"onegraph: error: ONEGRAPH_KERNELS is 'fast'; {told}"
