"""The soak: what it passes, what it finds, and that it goes on where it was killed."""

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepseek import save_hf
from fuzz import tiny
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.engine.scheduler import Scheduler
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.deepseek_v4 import DeepseekV4
from tiny_decoder import TinyDecoder
from tools.__main__ import main
from tools.rounds import GROWTH, SHAKEN, Round, judge, looped, read_rounds, soak
from tools.soak import plot
from tools.traffic import _judged, crowded, soak_traffic


def maker(model, **options):
    options = {"max_context": 256, "capture": False} | options
    return lambda tested: Engine(model, max_batch=2 if tested else 1, **options)


def test_700_steps(tmp_path):
    """Three rounds."""
    verdict = soak(maker(TinyDecoder(dim=16, layers=1)), steps=700, path=tmp_path / "rounds.jsonl")
    assert verdict.passed, verdict.problems
    assert (verdict.steps, verdict.rounds) == (700, 3)
    assert verdict.drift < 1e-5
    assert verdict.growth <= GROWTH


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    path = tmp_path_factory.mktemp("soak") / "m"
    save_hf("flash", path, num_hidden_layers=3, compress_ratios=[0, 4, 128], num_hash_layers=1)
    return path


def test_deepseek_placed_over_two_devices(deepseek, tmp_path):
    """On one: test_on_the_command_line_killed_and_started_again."""
    with Checkpoint.open(deepseek) as checkpoint:
        model = DeepseekV4.load(checkpoint, ["cpu"] * 2)
    verdict = soak(maker(model, chunk=64, max_context=144), steps=140, path=tmp_path / "rounds.jsonl")
    assert verdict.passed, verdict.problems
    assert verdict.drift < 1e-4


@pytest.mark.parametrize("damaged", [False, True])
def test_bfloat16(deepseek, damaged, tmp_path):
    """What rounding and near-ties of the router do is let pass; a window that loses one of its 16 keys is not."""
    with Checkpoint.open(deepseek) as checkpoint:
        model = DeepseekV4.load(checkpoint, "cpu", torch.bfloat16)
    engines = []

    def make(tested):
        engines.append(maker(model, max_context=144)(tested))
        return engines[-1]

    def lose_a_key(this, done):
        cache = engines[0].executor.cache
        view = cache.view

        def spoiled(*arguments):
            for window in cache.windows.values():
                window[1:, 5] = 0
            return view(*arguments)

        cache.view = spoiled

    path = tmp_path / "rounds.jsonl"
    verdict = soak(make, steps=200, path=path, batch=1, on_round=lose_a_key if damaged else None)
    if not damaged:  # whose texts are others, and whether passes from nothing differ in one of three is chance
        assert verdict.noise > 1e-3, "bfloat16 rounds"
    assert [problem.split(" by ")[0] for problem in verdict.problems] == ["logits drifted"] * damaged


def test_state_that_is_damaged_on_the_way_is_found(tmp_path):
    """One value of one page, in one layer, as a stray write would leave it."""
    engines = []

    def make(tested):
        engines.append(maker(TinyDecoder())(tested))
        return engines[-1]

    def damage(this, done):
        tables = engines[0].executor.step("decode", sampling=True).stages[0].inputs["table"]
        attend = type(engines[0].executor.cache).attend
        if done < 240:
            return
        page = int(tables[0, 0])

        def spoiled(cache, attention, qkv):
            cache.keys[0][page, 2] += 0.01
            return attend(cache, attention, qkv)

        held = engines[0].executor.cache
        held.__class__ = type("Spoiled", (type(held),), {"view": spoil_view(spoiled)})

    verdict = soak(make, steps=480, path=tmp_path / "rounds.jsonl", on_round=damage)
    assert any("drifted" in problem for problem in verdict.problems)


def spoil_view(spoiled):
    from onegraph.nn.attention import PagedCache

    def view(self, *arguments):
        seen = PagedCache.view(self, *arguments)
        seen.attend = lambda attention, qkv: spoiled(seen, attention, qkv)
        return seen

    return view


class Chooser(TinyDecoder):
    """At position 8 a token takes one way or the other by whether a 1 of its embedding exceeds `threshold`."""

    def __init__(self, threshold: float):
        super().__init__()
        self.embed.weight[:, 0], self.threshold = 1.0, threshold

    def run(self, stage, x, tokens, cache):
        position = getattr(cache, "cache", cache).positions[:, None] + torch.arange(tokens.shape[1])
        x = x + 3.0 * ((position == 8) & (x[:, :, 0] > self.threshold)).unsqueeze(2)
        return super().run(stage, x, tokens, cache)


@pytest.mark.parametrize(("gap", "passes"), [(2.0**-23, True), (1e-4, False)])
def test_a_tie_that_fell_otherwise_is_told_from_damage(gap, passes, tmp_path):
    """All passes from nothing take one way and the state has taken the other: what a tie may do, and nothing else."""
    state, nothing = (maker(Chooser(threshold)) for threshold in (1 - gap / 2, 1 + gap / 2))
    lines = []
    verdict = soak(
        lambda tested: (state if tested else nothing)(tested),
        steps=240,
        path=tmp_path / "rounds.jsonl",
        batch=1,
        on_round=lambda this, done: lines.append(this),
    )
    assert all(1 <= line.shaken <= SHAKEN for line in lines)
    assert all(line.plain > 1e-3 > line.noise for line in lines)
    assert verdict.passed is passes, verdict.problems
    assert passes is (verdict.drift < 1e-5)


def test_a_storage_that_moves_is_found(tmp_path):
    engines = []

    def make(tested):
        engines.append(maker(TinyDecoder())(tested))
        return engines[-1]

    def move(this, done):
        engines[0].executor.cache.values[1] = engines[0].executor.cache.values[1].clone()

    verdict = soak(make, steps=260, path=tmp_path / "rounds.jsonl", on_round=move)
    assert any("state 3: a graph holds the old address" in problem for problem in verdict.problems)


GROWING = """
import sys
from pathlib import Path
from test_soak import GROWTH, TinyDecoder, maker, soak
held = []
model = TinyDecoder(dim=16, layers=1)
hold = lambda this, done: held.append(b"x" * (2 * GROWTH))
print(*soak(maker(model), steps=260, path=Path(sys.argv[1]), on_round=hold).problems)
"""


def test_memory_that_grows_is_found(tmp_path, repo):
    """In a process of its own: what earlier tests free meanwhile would hide what is held here."""
    command = [sys.executable, "-c", GROWING, str(tmp_path / "rounds.jsonl")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert "memory grew" in ran.stdout, ran.stderr


GOOD = Round(number=0, steps=100, run=0, memory=[10**9], moved=[], drift=1e-6, noise=1e-6, looped=0.0, tokens=[1])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"memory": [10**9 + GROWTH + 1]}, "memory grew"),
        ({"moved": ["state 4"]}, "moved"),
        ({"drift": 1e-3}, "drifted by 1.00e-03 in round 1"),
        ({"drift": float("inf")}, "drifted by inf"),
        ({"drift": float("nan")}, "drifted by nan"),
        ({"looped": 0.5}, "50% of a round's tokens were loops"),
    ],
)
def test_the_verdict_names_each_problem(change, says):
    verdict = judge([GOOD, replace(GOOD, number=1, **change)])
    assert len(verdict.problems) == 1
    assert says in verdict.problems[0]
    assert judge([GOOD, replace(GOOD, number=1)]).passed


def test_one_limit_holds_for_every_round():
    """A round of small noise whose drift is let pass does not hide another whose drift is not."""
    quiet, loud = replace(GOOD, drift=9e-5), replace(GOOD, number=1, drift=9e-4, noise=3e-5)
    assert "drifted by 9.00e-04 in round 1" in judge([quiet, loud]).problems[0]


def test_a_lasting_drift_does_not_hide_behind_one_loud_round():
    rounds = [replace(GOOD, number=i, drift=0.03, noise=0.1 if i == 2 else 5e-3) for i in range(5)]
    assert "drifted by 3.00e-02 or more in half of the rounds" in judge(rounds).problems[0]
    assert judge([replace(r, drift=0.03 if i == 1 else 5e-3) for i, r in enumerate(rounds)], eps=2.0**-7).passed


def test_where_ties_are_rare_a_yardstick_that_met_one_lets_no_drift_pass():
    rounds = [replace(GOOD, number=i, noise=1e-3 if i == 2 else 1e-6) for i in range(5)]
    assert judge(rounds).passed
    found = judge([replace(r, drift=2e-3 if i == 4 else 1e-6) for i, r in enumerate(rounds)])
    assert "drifted by 2.00e-03 in round 4" in found.problems[0]


def test_passes_from_nothing_that_differ_are_found_themselves():
    """As by a kernel that races: state and yardstick are equally wrong, and drift is no larger than noise."""
    rounds = [replace(GOOD, number=i, drift=2e-3, noise=3e-3) for i in range(3)]
    assert "passes over the same tokens, cut otherwise, differ by 3.00e-03" in judge(rounds).problems[0]
    assert judge(rounds, eps=2.0**-7).passed, "in bfloat16"
    rest = [replace(r, drift=1e-6, noise=1e-6) for r in rounds[1:]]
    assert judge([replace(rounds[0], drift=1e-6), *rest]).passed, "one pass met a near-tie"


def test_memory_is_compared_within_a_process():
    assert judge([GOOD, replace(GOOD, number=1, run=1, memory=[2 * 10**9])]).passed


def test_loops():
    assert looped([7] * 100) == 100
    assert looped([1, 2, 3] * 30) == 90
    assert looped([1, 2, 3] * 20) == 0, "too short"
    assert looped(list(range(500))) == 0
    assert looped([*range(50), *[4, 5] * 40, *range(60)]) in (80, 81)
    assert looped(list(range(40)) * 4) == 0, "a long period is a text that repeats itself, not a loop"


def test_a_soak_that_was_cut_off_goes_on(tmp_path):
    """Any prefix of the file, the last line torn, gives the same rounds in the end but for memory and process."""
    path = tmp_path / "rounds.jsonl"
    make = maker(TinyDecoder(dim=16, layers=1), max_context=64)
    soak(make, steps=120, path=path)
    whole = path.read_bytes()

    def rounds(data: bytes):
        lines = [json.loads(line) for line in data.decode().splitlines()[1:]]
        return [{k: v for k, v in line.items() if k not in ("memory", "run")} for line in lines]

    for cut in (0, 30, len(whole) // 3, len(whole) - 5):
        path.write_bytes(whole[:cut])
        verdict = soak(make, steps=120, path=path)
        assert verdict.steps == 120
        assert rounds(path.read_bytes()) == rounds(whole)


def test_a_file_of_another_soak_is_refused(tmp_path):
    path = tmp_path / "rounds.jsonl"
    settings = {"seed": 1, "batch": 2, "prompt": 16, "context": 256}
    read_rounds(path, settings)
    with pytest.raises(ValueError, match="this one has"):
        soak(maker(TinyDecoder()), steps=10, path=path)
    path.write_text("hello\n")
    with pytest.raises(ValueError, match="is not a file of a soak"):
        soak(maker(TinyDecoder()), steps=10, path=path)
    with pytest.raises(ValueError, match="a round needs 2 steps"):
        soak(maker(TinyDecoder(), max_context=16), steps=10, path=tmp_path / "other")


def command(model: Path, out: Path, steps: int = 260) -> list[str]:
    options = ["--device", "cpu", "--context", "144", "--json"]
    return ["soak", str(model), "--out", str(out), "--steps", str(steps), *options]


def test_on_the_command_line_killed_and_started_again(deepseek, tmp_path, capsys, repo):
    process = subprocess.Popen(
        [sys.executable, "-m", "tools", *command(deepseek, tmp_path / "out")],
        cwd=repo,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    path, until = tmp_path / "out" / "rounds.jsonl", time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert main(command(deepseek, tmp_path / "out")) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["passed"]
    assert result["drift"] < 1e-4
    assert result["steps"] == 260
    found = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert [r["number"] for r in found] == list(range(result["rounds"]))
    assert {r["run"] for r in found} == {0, 1}
    assert sorted(p.name for p in path.parent.iterdir()) == ["plot.svg", "rounds.jsonl"]
    ET.fromstring((path.parent / "plot.svg").read_text())


def test_the_plot_shows_every_round():
    rounds = [
        replace(GOOD, number=i, memory=[10**9 + i, 10**9], drift=float("nan") if i == 3 else 1e-6) for i in range(9)
    ]
    picture = ET.fromstring(plot(rounds))
    lines = [e for e in picture if e.tag.endswith("polyline")]
    assert len(lines) == 5
    assert all(len(line.attrib["points"].split()) == 9 for line in lines)


def test_gpus_are_for_deepseek(tmp_path, capsys):
    tiny.write_model(tmp_path / "m")
    assert main([*command(tmp_path / "m", tmp_path / "out"), "--gpus", "2"]) == 2
    assert "--gpus is 2; soak takes several for DeepSeek-V4 alone" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu_captured_steps_leave_the_state_of_eager_ones(deepseek, dtype):
    """Bit for bit, all of it, after hundreds of steps: capture adds no drift of its own, and no kernel races."""
    with Checkpoint.open(deepseek) as checkpoint:
        model = DeepseekV4.load(checkpoint, "cuda:0", dtype)
    prompts = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(0)).tolist()
    params = [SamplingParams(max_tokens=400, temperature=1.0, seed=i) for i in range(2)]
    texts, states = [], []
    for capture in (True, False):
        engine = Engine(model, max_batch=2, max_context=512, capture=capture)
        texts.append(engine.generate(prompts, params))
        states.append(engine.executor.cache.tensors())
    assert texts[0] == texts[1]
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    assert any(t.any() for t in states[0])


@pytest.mark.gpu
def test_on_a_gpu_captured(deepseek, tmp_path):
    with Checkpoint.open(deepseek) as checkpoint:
        model = DeepseekV4.load(checkpoint, "cuda:0")
    verdict = soak(maker(model, capture=True), steps=2000, path=tmp_path / "rounds.jsonl")
    assert verdict.passed, verdict.problems
    assert torch.cuda.memory_allocated() > 0


def crowd(model, kvs=("exact",)):
    return lambda tested, kv: Engine(
        model, max_batch=3 if tested else 1, max_context=96, capture=False, chunk=32,
        **crowded(model, 3, 96, kv, tested),
    )  # fmt: skip


def test_traffic_is_held_to_passes_from_nothing_and_goes_on(tmp_path):
    """Caches take turns; begun anew in the middle, it has the rounds of one that was never stopped."""
    model = TinyDecoder(dim=16, layers=1, head_dim=64)
    how = {"kvs": ["exact", "turboquant:4,window=16"], "per_round": 150}
    verdict = soak_traffic(crowd(model), steps=450, path=tmp_path / "whole.jsonl", **how)
    assert verdict.passed, verdict.problems
    assert (verdict.steps, verdict.rounds) == (450, 3)
    soak_traffic(crowd(model), steps=450, path=tmp_path / "cut.jsonl", seconds=1e-9, **how)
    assert len(read_rounds(tmp_path / "cut.jsonl")) == 1
    soak_traffic(crowd(model), steps=450, path=tmp_path / "cut.jsonl", **how)
    whole, cut = (read_rounds(tmp_path / f"{name}.jsonl") for name in ("whole", "cut"))
    assert [replace(r, memory=[], run=0) for r in cut] == [replace(r, memory=[], run=0) for r in whole]
    assert [r.kv for r in whole] == [*how["kvs"], how["kvs"][0]]
    for r in whole:
        assert min(r.joined, r.cancelled, r.preempted, r.drift) > 0, r
    with pytest.raises(ValueError, match="is of a soak with"):
        soak_traffic(crowd(model), steps=450, path=tmp_path / "cut.jsonl", seed=1, **how)


def test_traffic_finds_what_is_lost(tmp_path, monkeypatch):
    give_back, lost = Scheduler._give_back, []

    def lose(self, sequence):
        if not lost:
            lost.append(sequence.pages.pop())
        give_back(self, sequence)

    monkeypatch.setattr(Scheduler, "_give_back", lose)
    with pytest.raises(RuntimeError, match="8 of 9 pages and 3 of 3 slots are free: the scheduler loses some"):
        soak_traffic(crowd(TinyDecoder()), kvs=["exact"], per_round=150, steps=150, path=tmp_path / "r.jsonl")


def test_traffic_finds_what_another_wrote_into_a_page(tmp_path, monkeypatch):
    drain = Scheduler.drain

    def write(self):
        drain(self)
        for sequence in self.running:
            for tensor in self.executor.cache.tensors():
                tensor[sequence.pages[0], 1] = 0.5

    monkeypatch.setattr(Scheduler, "drain", write)
    verdict = soak_traffic(crowd(TinyDecoder()), kvs=["exact"], per_round=150, steps=150, path=tmp_path / "r.jsonl")
    assert verdict.problems[0].startswith("exact: logits drifted")


def test_caches_are_judged_each_by_itself():
    """Near-ties of codes make passes differ by what would be a fault without codes."""
    round_ = Round(number=0, steps=9, run=0, memory=[0], moved=[], drift=2e-3, noise=1e-2, looped=0, tokens=[])
    rounds = [replace(round_, kv="exact", drift=1e-6, noise=1e-6), replace(round_, kv="turboquant:4")] * 2
    verdict = _judged(rounds, 0, 2.0**-23)
    assert (verdict.passed, verdict.steps, verdict.drift) == (True, 36, 2e-3)
    assert not _judged([*rounds, replace(round_, kv="exact")], 0, 2.0**-23).passed
    assert not _judged([*rounds, replace(round_, kv="turboquant:4", drift=0.1)], 0, 2.0**-23).passed


def test_what_a_second_kind_of_cache_builds_in_its_first_round_is_no_growth():
    round_ = Round(number=0, steps=9, run=0, memory=[5], moved=[], drift=0, noise=0, looped=0, tokens=[], kv="exact")
    coded = replace(round_, kv="turboquant:4", memory=[9])
    rounds = [round_, coded, replace(round_, memory=[9]), coded]
    assert _judged(rounds, 0, 2.0**-23).growth == 0
    grown = _judged([*rounds, replace(round_, memory=[10])], 0, 2.0**-23)
    assert (grown.growth, len(grown.problems), grown.passed) == (1, 1, False)
    other = [replace(coded, run=1), replace(round_, run=1, memory=[12]), replace(coded, run=1, memory=[13])]
    assert _judged([*rounds, *other], 0, 2.0**-23).growth == 1, "each process from its own first rounds on"


def test_traffic_on_the_command_line(tmp_path, capsys):
    model = tiny.write_model(tmp_path / "m")
    words = ["soak", str(model), "--device=cpu", "--traffic", "--kv=exact", "--context=64", "--steps=128"]
    assert main([*words, "--minutes=5", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert "128 steps in 2 rounds" in said.out
    assert main([*words, "--round=128", "--out", str(tmp_path / "one")]) == 0
    assert "128 steps in 1 rounds" in capsys.readouterr().out
    assert "joined" in said.err
    assert ET.parse(tmp_path / "out" / "plot.svg")
    for word in ("--minutes", "--round"):
        assert main(["soak", str(model), "--device=cpu", f"{word}=1", "--out", str(tmp_path / "o")]) == 2
        assert f"{word} is for --traffic alone" in capsys.readouterr().err
