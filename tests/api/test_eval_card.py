"""`eval --card`: figures in a model card, which stays the card that people edit."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fuzz import tiny
from fuzz.run import invoke
from onegraph import verify
from onegraph.api import quality
from onegraph.api.quality import BEGIN, END, Measure, card_of, record
from onegraph.formats.files import CheckpointError

DIGEST = "9b" * 32
FIGURES: dict[str, Any] = {
    "tokens": 16352, "window": 512, "perplexity": 15.00123, "reference_perplexity": 14.4911,
    "kl": 0.0409012, "kl_error": 0.000123, "top1": 0.89312, "kv": "exact", "needle": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("base") / "Base `1B")


@pytest.fixture(scope="module")
def text(base: Path) -> Path:
    file = base.parent / "some.txt"
    file.write_text("the thing in the inn, and a hat. " * 200)
    return file


@pytest.fixture(scope="module")
def made(base: Path, text: Path) -> Path:
    out = base.parent / "4bit"
    sizes = ["--num-calibration-tokens", 512, "--calibration-seq-len", 64, "--recipe", "quick", "--device", "cpu"]
    status, _, errors = invoke(["quantize", base, out, "--calibration", text, *sizes])
    assert status == 0, errors
    return out


@pytest.fixture
def model(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "4bit"))


def measure(**changes: Any) -> Measure:
    given: dict[str, Any] = {"figures": FIGURES, "text": "wiki.txt", "sha256": DIGEST, "reference": Path("/x/Base")}
    given |= {"needle": None, "computed": "in float32 on a CPU", "day": "2026-11-24"}
    return Measure(**given | changes)


def card_with(tmp_path: Path, content: str | bytes) -> Path:
    """A model directory's card."""
    card = tmp_path / "README.md"
    card.write_bytes(content if isinstance(content, bytes) else content.encode())
    return card


def evaluated(model: Path, base: Path, text: Path, *more: object) -> tuple[int, str, str]:
    words = ["--text", text, "--tokens", 1200, "--window", 100, "--device", "cpu", *more]
    return invoke(["eval", model, "--reference", base, "--card", *words])


def test_the_command_writes_what_it_measured_where_the_card_says_so(model: Path, base: Path, text: Path) -> None:
    before = (model / "README.md").read_text()
    head, _, rest = before.partition(f"{BEGIN}\n\n")
    unmeasured, _, foot = rest.partition(f"\n\n{END}\n")
    assert head.endswith("## Quality\n\n")
    assert "--card` measures it and puts the figures here" in unmeasured
    status, out, errors = evaluated(model, base, text, "--json")
    assert status == 0, errors
    assert f"{model / 'README.md'}: updated with these figures" in errors
    found = json.loads(out)
    assert found["text_sha256"] == hashlib.sha256(text.read_bytes()).hexdigest()
    after = (model / "README.md").read_text()
    assert after.startswith(head + BEGIN)
    assert after.endswith(f"\n{END}\n" + foot)
    assert unmeasured not in after
    on = f"On `some.txt` (SHA-256 `{found['text_sha256']}`), 1,188 tokens in windows of 100"
    assert f"{on}: against `Base ?1B`, " in after
    today = datetime.datetime.now(datetime.UTC).date()
    assert re.search(
        rf"computed in float32 on a CPU, onegraph [\d.]+, ({today}|{today - datetime.timedelta(1)})\.", after
    )
    assert f"| perplexity | {found['perplexity']:.4f} | {found['reference_perplexity']:.4f} |" in after
    assert f"| KL to the reference, nats per token | {found['kl']:.5f} ± {found['kl_error']:.5f} |  |" in after
    assert f"| top-1 agreement | {100 * found['top1']:.2f} % |  |" in after
    assert sorted(path.name for path in model.iterdir() if path.name.startswith(".")) == []
    assert verify(model).ok, "SHA256SUMS has no digest of the card"
    assert evaluated(model, base, text)[0] == 0
    assert (model / "README.md").read_text() == after, "the same measure again"
    status, out, errors = evaluated(model, base, text, "--tokens", 1100)
    assert out.startswith("tokens "), errors
    assert (model / "README.md").read_text().count("<!-- measure ") == 2


def test_a_card_takes_no_figures_of_a_few_tokens(model: Path, base: Path, text: Path, tmp_path: Path) -> None:
    card = (model / "README.md").read_text()
    (tmp_path / "word").write_text("hat")
    for words, count in (("--tokens", 999), 999), (("--text", tmp_path / "word"), 3):
        status, out, errors = evaluated(model, base, text, *words)
        assert (status, out) == (2, "")
        says = f"{count} tokens of the text are measured; at least 1000 are needed, for a model card"
        assert errors == f"onegraph: error: {says}\n", "before anything was evaluated"
    assert (model / "README.md").read_text() == card


def test_figures_of_a_few_tokens_come_with_a_warning(base: Path, text: Path) -> None:
    command = ["eval", base, "--window", 100, "--device", "cpu", "--text", text, "--tokens"]
    warning = "warning: figures of 500 tokens mean little; give some thousand tokens of text"
    for more in ((), ("--ab",), ("--json",)):
        status, _, errors = invoke([*command, 500, *more])
        assert status == 0, errors
        assert errors.splitlines()[0] == warning
    status, _, errors = invoke([*command, 4000])
    assert status == 0, errors
    assert "warning" not in errors


def test_another_measure_stands_beside_and_the_same_one_replaces(tmp_path: Path) -> None:
    card = card_with(tmp_path, "# Mine\r\n\r\nText.\r\n")
    card.chmod(0o640)
    record(card, measure())
    others = [
        measure(sha256="ab" * 32),
        measure(reference=None, figures=FIGURES | {"kl": None}),
        measure(reference=Path("/x/models--org--Base/snapshots/a1b2")),
        measure(needle=2048, figures=FIGURES | {"needle": [[1, 1], [0, 1]]}),
        *(measure(figures=FIGURES | change) for change in ({"tokens": 8}, {"window": 64}, {"kv": "turboquant:4"})),
    ]
    for count, other in enumerate(others, 2):
        record(card, other)
        assert card.read_bytes().count(b"<!-- measure ") == count
    edited = card.read_bytes() + b"\nMy own words.\r\n"
    card.write_bytes(edited)
    record(
        card, measure(figures=FIGURES | {"kl": 0.5}, day="2027-01-01", text="w.txt", computed="in bfloat16 on an H200")
    )
    got = card.read_text()
    assert got.count("<!-- measure ") == len(others) + 1
    assert got.index("0.50000 ± 0.00012") < got.index("ab" * 32), "in its old place"
    assert "on an H200, onegraph" in got
    assert card.read_bytes().startswith(b"# Mine\r\n\r\nText.\n\n## Quality\n")
    assert card.read_bytes().endswith(END.encode() + b"\n\nMy own words.\r\n")
    assert "| perplexity | 15.0012 |\n" in got, "without a reference there is no column of it"
    assert "against `org/Base@a1b2`" in got
    assert "| needles found in 2048 tokens | 3 of 4 |" in got
    assert "KV cache `turboquant:4`" in got
    assert card.stat().st_mode & 0o777 == 0o640


def test_with_codes_and_no_reference_the_exact_cache_is_what_it_is_held_to() -> None:
    told = str(measure(reference=None, figures=FIGURES | {"kv": "turboquant:4"}))
    assert ": against the exact cache, KV cache `turboquant:4`, computed in" in told


def test_marks_of_a_card_with_carriage_returns_are_found(tmp_path: Path) -> None:
    card = card_with(tmp_path, f"front\r\n{BEGIN} \r\nold\r\n{END}\r\nback\r\n")
    record(card, measure())
    record(card, measure())
    assert card.read_bytes().startswith(f"front\r\n{BEGIN}\n\n<!-- measure ".encode())
    assert card.read_bytes().endswith(f"|\n\n{END}\r\nback\r\n".encode())
    assert card.read_text().count("<!-- measure ") == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, r"README\.md: no such file; figures are added to a model card that is there"),
        (f"a\n{BEGIN}\nb\n", "has 1 lines <!-- onegraph eval --> and 0 lines <!-- /onegraph eval -->; it takes one"),
        (f"{END}\n{BEGIN}\n", "has 1 lines .* and 1 lines"),
        (f"{BEGIN}\n{END}\n{BEGIN}\n{END}\n", "has 2 lines .* and 2 lines"),
        (b"abc\xff", "not UTF-8 text at byte 3"),
        (b"a" * (quality.MAX_CARD + 1), "at most 4194304 are allowed"),
    ],
)
def test_cards_that_cannot_be_written_are_refused_first(
    content: str | bytes | None, says: str, model: Path, base: Path, text: Path
) -> None:
    (model / "README.md").unlink()
    if content is not None:
        card_with(model, content)
    status, out, errors = evaluated(model, base, text)
    assert (status, out, len(errors.splitlines())) == (2, "", 1)
    assert re.search(says, errors), errors


def test_a_gguf_file_a_cache_and_a_card_with_a_digest_are_refused(model: Path, base: Path, text: Path) -> None:
    pytest.importorskip("gguf")
    file = tiny.write_gguf(model.parent / "m.gguf")
    status, out, errors = evaluated(file, base, text)
    assert (status, out) == (2, "")
    assert errors == f"onegraph: error: {file}: a .gguf file has no model card; figures are written to a model " + (
        "directory's\n"
    )
    snapshot = model.parent / "models--org--m" / "snapshots" / "a1b2"
    shutil.copytree(model, snapshot)
    blob = snapshot.parent.parent / "blobs" / "c3"
    blob.parent.mkdir()
    (snapshot / "README.md").rename(blob)
    (snapshot / "README.md").symlink_to(blob)
    with pytest.raises(CheckpointError, match=r"in the cache of the hub.*--local-dir DIR\) and give DIR"):
        card_of(snapshot)
    with (model / "SHA256SUMS").open("a") as sums:
        sums.write(f"{'0' * 64}  README.md\n")
    with pytest.raises(CheckpointError, match=r"SHA256SUMS: has a digest of README\.md, which would be wrong then"):
        card_of(model)


def test_a_card_that_is_a_link_in_its_directory_stays_one(tmp_path: Path) -> None:
    (tmp_path / "card.md").write_text("# Mine\n")
    (tmp_path / "README.md").symlink_to("card.md")
    record(card_of(tmp_path), measure())
    assert (tmp_path / "README.md").is_symlink()
    assert BEGIN in (tmp_path / "card.md").read_text()


def test_a_directory_that_cannot_be_written(
    model: Path, base: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.chmod(0o555)
    if os.geteuid() == 0:  # who may write everywhere
        monkeypatch.setattr(quality.os, "access", lambda path, mode: Path(path) != model)
    status, out, errors = evaluated(model, base, text)
    model.chmod(0o755)
    assert (status, out) == (2, "")
    assert errors == f"onegraph: error: {model}: the directory cannot be written, so the card cannot be changed\n"


def test_a_disk_that_fills_leaves_the_card_and_the_figures(
    model: Path, base: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (model / "README.md").read_bytes()

    def full(*names: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onegraph.formats.files.os.replace", full)
    status, out, errors = evaluated(model, base, text, "--json")
    assert status == 2
    assert json.loads(out)["kl"] > 0
    assert errors.splitlines()[-1] == f"onegraph: error: {model / 'README.md'}: No space left on device"
    assert (model / "README.md").read_bytes() == before
    assert not [path for path in model.iterdir() if path.name.endswith(".tmp")]


def test_other_measures_are_not_for_the_card(model: Path, base: Path, text: Path) -> None:
    for option in ("--ab", "--generation"):
        status, _, errors = evaluated(model, base, text, option)
        assert status == 2
        says = "--card: got --ab or --generation; the card takes figures of the text only; leave them out"
        assert errors == f"onegraph: error: {says}\n"


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("ONEGRAPH_SMOLLM2_4BIT"), reason="ONEGRAPH_SMOLLM2_4BIT is not set")
@pytest.mark.skipif(not os.environ.get("ONEGRAPH_SMOLLM2"), reason="ONEGRAPH_SMOLLM2 is not set")
def test_the_real_command_on_the_real_model(tmp_path: Path) -> None:
    from tools.demo import evaluation_text

    source, model = Path(os.environ["ONEGRAPH_SMOLLM2_4BIT"]), tmp_path / "smollm2-4bit"
    shutil.copytree(source, model)
    (tmp_path / "topics.txt").write_text(evaluation_text())
    words = [
        "--reference",
        os.environ["ONEGRAPH_SMOLLM2"],
        "--text",
        tmp_path / "topics.txt",
        "--tokens",
        1024,
        "--card",
    ]
    command = [sys.executable, "-m", "onegraph", "eval", model, *words, "--device", "cpu", "--json"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found, card = json.loads(done.stdout), (model / "README.md").read_text()
    assert 0.01 < found["kl"] < 0.1
    assert f"| KL to the reference, nats per token | {found['kl']:.5f} ± {found['kl_error']:.5f} |" in card
    assert f"against `{Path(os.environ['ONEGRAPH_SMOLLM2']).name}`" in card
    assert verify(model).ok
