"""One fuzz case from one seed: what it damages, what it runs, and what it demands of the end."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import random
import re
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np

from onegraph.api.outline import foreign
from onegraph.cli import main
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.gguf_config import _ABOUT, _NEUTRAL, _READ
from onegraph.models.llama import Llama

from . import tiny
from .damage import ABSURD, absurd, damage_bytes, damage_file, damage_header, damage_json, damage_tensors
from .served import Served

SERVED = 0.2  # of all cases, those that a server gets
SECONDS = 60  # a case takes some 0.1 s; what is still running then hangs
# What Python says of a mistake in the program: it must never be what a person is told about a mistake in a file.
INTERNALS = re.compile(
    r"Traceback|NoneType|not subscriptable|unhashable|unpack|object has no attribute|object is not|unexpected keyword|"
    r"positional argument|invalid literal|list index|out of bounds|expected scalar type|\bRuntimeError|internal error|"
    r"must be the same size|shape '\[|einsum|size mismatch|not implemented for|KeyError|IndexError|TypeError"
)


def _fits(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < 2**32


class Failure(AssertionError):
    """A case that did not end as it must."""


class Hang(BaseException):
    """The case ran out of time."""


class Fuzzer:
    """Models to damage, made once, and the cases."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = folder / "text.txt"
        self.text.write_text("the thing in the inn, and a hat. " * 100)
        self.plain = tiny.write_model(folder / "plain")
        self.sharded = tiny.write_model(folder / "sharded", shard_bytes=20_000)
        self.gguf = tiny.write_gguf(folder / "tiny.gguf")
        self.quantized = folder / "quantized"
        status, _, errors = invoke(
            [
                "quantize",
                self.plain,
                self.quantized,
                "--bits",
                "3",
                "--lm-head",
                "4",
                "--embed-tokens",
                "4",
                *self.quick(),
            ]
        )
        if status:
            raise Failure(errors)
        self.kinds: list[Callable[[random.Random, Path], list[object]]] = [
            self.bytes_of_weights, self.header, self.tensors, self.config, self.index, self.gguf_bytes, self.tokenizer,
            self.rate_map, self.piece, self.prompt, self.text_file, self.arguments, self.template, self.whole,
            self.gguf_metadata,
        ]  # fmt: skip
        self._served: Served | None = None

    @property
    def served(self) -> Served:
        """The server, started when a case first asks for it."""
        if self._served is None:
            (self.folder / "served").mkdir()
            self._served = Served(self.folder / "served", INTERNALS)
        return self._served

    def close(self) -> None:
        if self._served is not None:
            self._served.end()

    def quick(self) -> list[object]:
        return [
            "--calibration",
            self.text,
            "--num-calibration-tokens",
            "128",
            "--calibration-seq-len",
            "64",
            "--recipe",
            "quick",
        ]

    # Each kind prepares `work` and returns a command line.

    def use(self, rng: random.Random, model: Path, work: Path, quantized: bool = False) -> list[object]:
        """A command that reads `model`."""
        kind = rng.randrange(4)
        if kind == 0:
            return ["eval", model, "--text", self.text, "--tokens", "100", "--window", "50", "--json"]
        if kind == 1 and not quantized:
            return ["quantize", model, work / "out", "--bits", rng.choice((2, 3, 4)), *self.quick()]
        return ["generate", model, "--raw", "--prompt", "the thing", "--max-tokens", "3", "--json"]

    def copy(self, rng: random.Random, work: Path) -> tuple[Path, bool]:
        quantized = rng.random() < 0.5
        return Path(shutil.copytree(self.quantized if quantized else self.plain, work / "m")), quantized

    def bytes_of_weights(self, rng: random.Random, work: Path) -> list[object]:
        model, quantized = self.copy(rng, work)
        damage_file(rng, model / "model.safetensors")
        return self.use(rng, model, work, quantized)

    def header(self, rng: random.Random, work: Path) -> list[object]:
        model, quantized = self.copy(rng, work)
        damage_header(rng, model / "model.safetensors")
        return self.use(rng, model, work, quantized)

    def tensors(self, rng: random.Random, work: Path) -> list[object]:
        model, quantized = self.copy(rng, work)
        damage_tensors(rng, model / "model.safetensors")
        return self.use(rng, model, work, quantized)

    def config(self, rng: random.Random, work: Path) -> list[object]:
        model, quantized = self.copy(rng, work)
        damage_file(rng, model / "config.json")
        return self.use(rng, model, work, quantized)

    def index(self, rng: random.Random, work: Path) -> list[object]:
        model = Path(shutil.copytree(self.sharded, work / "m"))
        damage_file(rng, rng.choice(sorted(model.glob("model*"))))
        return self.use(rng, model, work)

    def gguf_bytes(self, rng: random.Random, work: Path) -> list[object]:
        file = work / "m.gguf"
        file.write_bytes(damage_bytes(rng, self.gguf.read_bytes()))
        return self.use(rng, file, work)

    def gguf_metadata(self, rng: random.Random, work: Path) -> list[object]:
        """Keys that files have, and others, with values that they have, and others."""
        names = [f"llama__{key.replace('.', '__')}" for key in (*_READ, *_NEUTRAL, *_ABOUT, "attention.scale", "wat")]
        names += [f"tokenizer__{key.replace('.', '__')}" for key in ("ggml.add_eos_token", "ggml.wat", "chat_template")]
        values = (*ABSURD, 1.0, 2.0, 0.25, "linear", "yarn", "none", "longrope")
        plain = [value for value in values if isinstance(value, str | float | bool) or _fits(value)]
        keys = {rng.choice(names): rng.choice(plain) for _ in range(rng.choice((1, 1, 2, 4)))}
        factors = rng.choice((None, None, None, [1.0] * 8, [8.0] * 8, [float("nan")] * 8, [2.0]))
        file = work / "m.gguf"
        try:
            tiny.write_gguf(file, factors=None if factors is None else np.array(factors, np.float32), **keys)
        except (ValueError, OverflowError, struct.error):  # what the writer itself does not take
            return self.use(rng, self.gguf, work)
        return self.use(rng, file, work)

    def tokenizer(self, rng: random.Random, work: Path) -> list[object]:
        model, _ = self.copy(rng, work)
        names = ["tokenizer.json"] * 3 + ["tokenizer_config.json", "generation_config.json"]
        damage_file(rng, model / rng.choice(names))
        return ["generate", model, "--raw", "--prompt", "the 12 thing<|im_end|>é", "--max-tokens", "3"]

    def rate_map(self, rng: random.Random, work: Path) -> list[object]:
        file = work / "map.json"
        rates = {"*.down_proj": 4, "*.v_proj": 2, "model.layers.0.self_attn.q_proj": 16}
        file.write_text(json.dumps(rates))
        if rng.random() < 0.5:
            damage_file(rng, file)
        else:
            file.write_text(json.dumps({**rates, rng.choice(("*", "nope", "lm_head", "[", "")): absurd(rng)}))
        return ["quantize", self.plain, work / "out", "--map", file, *self.quick()]

    def piece(self, rng: random.Random, work: Path) -> list[object]:
        """Work that was left unfinished, and then damaged."""
        command: list[object] = ["quantize", self.plain, work / "out", "--bits", "3", *self.quick()]
        with stopped_after(rng.choice((1, 2))):  # of two blocks
            invoke(command)
        files = [file for file in sorted((work / "out.partial").glob("*")) if file.is_file()]
        if files:
            file = rng.choice(files)
            if file.suffix == ".safetensors" and rng.random() < 0.5:
                damage_tensors(rng, file)
            else:
                damage_file(rng, file)
        return command

    def prompt(self, rng: random.Random, work: Path) -> list[object]:
        alphabets = ("the in a\n", "\0\x01\x1b\x7f", "é東😀\u202e\ufeff", "<|im_start|>", "\udcff\ud800", "0123456789")
        count = rng.choice((0, 1, 5, 50, 400, 20_000))
        text = "".join(rng.choice(rng.choice(alphabets)) for _ in range(count))
        if rng.random() < 0.3:
            file = work / "prompts.txt"
            file.write_bytes(text.encode("utf-8", rng.choice(("surrogatepass", "replace"))))
            return ["generate", self.plain, "--raw", "--batch", file, "--max-tokens", "2"]
        return ["generate", self.plain, "--raw", "--prompt", text, "--max-tokens", "2"]

    def text_file(self, rng: random.Random, work: Path) -> list[object]:
        file = work / "text"
        text = (rng.choice((b"", b"the ", b"\xff", "東".encode(), b"\0")) * rng.choice((0, 1, 30, 1000)))[:4000]
        file.write_bytes(damage_bytes(rng, text) if rng.random() < 0.5 else text)
        if rng.random() < 0.5:
            return ["eval", self.quantized, "--reference", self.plain, "--text", file, "--tokens", "200"]
        return ["quantize", self.plain, work / "out", *self.quick()[2:], "--calibration", file]

    def arguments(self, rng: random.Random, work: Path) -> list[object]:
        """A good command line with words replaced, removed, repeated or added."""
        lines: list[list[object]] = [
            [
                "generate",
                self.plain,
                "--raw",
                "--prompt",
                "the",
                "--max-tokens",
                "2",
                "--temperature",
                "0.7",
                "--top-k",
                "5",
            ],
            ["generate", self.gguf, "--prompt", "the", "--max-tokens", "2", "--top-p", "0.9", "--seed", "1", "--raw"],
            [
                "quantize",
                self.plain,
                work / "out",
                "--bits",
                "2",
                "--layer",
                "*.down_proj=4",
                "--seed",
                "3",
                *self.quick(),
            ],
            ["eval", self.plain, "--text", self.text, "--tokens", "64", "--window", "32", "--device", "cpu"],
            ["bench", "step", self.plain, "--context", "8", "--steps", "8", "--json"],
        ]
        words = rng.choice(lines)
        wrong = [
            "", "-1", "0", "1e9", "nan", "inf", "-inf", "9" * 30, "0x10", "１", "4.0", "true", "--", "-", "--wat", "-h",
            "--bits", "--prompt", "cuda", "cuda:9", "tpu", "\0", "\n", "é", "a=b", "*=9", "=4", "7x", "/dev/null", "/",
            str(work), str(self.text), str(work / "no" / "such"), "--capture=on", "--dtype=int8", "--debug=1",
        ]  # fmt: skip
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(words))
            kind = rng.randrange(4)
            if kind == 0:
                words[at] = rng.choice(wrong)
            elif kind == 1:
                del words[at]
            elif kind == 2:
                words.insert(at, words[at])
            else:
                words.insert(at, rng.choice(wrong))
            if not words:
                break
        return words

    def template(self, rng: random.Random, work: Path) -> list[object]:
        model, _ = self.copy(rng, work)
        templates = [tiny.TEMPLATE, "{{ messages[0].content.__class__ }}", "{{ x.y.z }}", "{% raw %}", "", "{{ 1/0 }}"]
        text = rng.choice(templates)
        if text and rng.random() < 0.5:
            text = damage_bytes(rng, text.encode()).decode("utf-8", "replace")
        (model / "chat_template.jinja").write_text(text)
        return ["generate", model, "--chat", "--prompt", "the", "--max-tokens", "2"]

    def whole(self, rng: random.Random, work: Path) -> list[object]:
        """Any file of a checkpoint, with and without digests."""
        model = Path(shutil.copytree(rng.choice((self.plain, self.sharded, self.quantized)), work / "m"))
        if rng.random() < 0.5:
            (model / "SHA256SUMS").unlink()
        file = rng.choice(sorted(model.iterdir()))
        damage = rng.choice((damage_file, damage_header, damage_tensors))
        (damage if file.suffix == ".safetensors" else damage_file)(rng, file)
        return ["verify", model, *rng.choice(([], ["--json"]))]

    # ---------------------------------------------------------------------------------------------------- judging

    def run(self, seed: int) -> str:
        """Runs the case of `seed` and says what it was; raises Failure where it did not end as it must."""
        rng = random.Random(seed)
        if rng.random() < SERVED:
            try:
                return f"seed {seed}: " + rng.choice((self.served.message, self.served.connection))(rng)
            except (AssertionError, OSError, ValueError, http.client.HTTPException) as error:
                raise Failure(f"seed {seed}: {type(error).__name__}: {error}") from error
        kind = rng.choice(self.kinds)
        work = Path(tempfile.mkdtemp(dir=self.folder))
        started = time.perf_counter()
        try:
            command = [str(word) for word in kind(rng, work)]
            what = f"seed {seed}, {kind.__name__}: onegraph {' '.join(map(repr, command))[:400]}"
            try:
                status, out, errors = invoke(command)
                if command[:1] == ["verify"] and status == 1 and (out.endswith("damaged\n") or '"ok": false' in out):
                    status = 0  # it is what was asked for
                judge(status, out, errors, work)
            except Hang:
                raise Failure(f"{what}\nstill running after {SECONDS} s") from None
            except Failure as failure:
                raise Failure(f"{what}\n{failure}") from None
            except BaseException as error:
                raise Failure(f"{what}\nraised {type(error).__name__}: {error}") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return f"{what} -> {status} in {time.perf_counter() - started:.2f} s"


def judge(status: int, out: str, errors: str, work: Path) -> None:
    """Success, or one clear line and status 2; and nothing half-written either way."""
    said = [line for line in errors.splitlines() if line.startswith("onegraph: ")]
    everything = f"status {status}\nstdout: {out[-300:]!r}\nstderr: {errors[-1500:]}"
    if status not in (0, 2):
        raise Failure(f"it ends with a status that is neither 0 nor 2\n{everything}")
    if status == 2 and (
        len(said) != 1 or not errors.endswith(said[0] + "\n") or not said[0][10:].startswith("error: ")
    ):
        raise Failure(f"an error is not one line at the end of stderr\n{everything}")
    if status == 0 and said:
        raise Failure(f"success with an error\n{everything}")
    words = said[0] if status == 2 and "chat template failed" not in said[0] else ""  # which tells the template's error
    if len(words) > 600 or INTERNALS.search(words):
        raise Failure(f"the line does not say what is wrong in words for people\n{everything}")
    if "Traceback" in errors or "panicked" in errors:
        raise Failure(f"a traceback\n{everything}")
    left = [path.name for path in work.iterdir() if path.name.endswith(".tmp")]
    if left:
        raise Failure(f"half-written: {left}\n{everything}")
    output = work / "out"
    if output.exists():
        with Checkpoint.open(output) as checkpoint:
            if not foreign(checkpoint.config):  # else transformers runs it: a damaged number may be one that it takes
                Llama.load(checkpoint)
        if status:
            raise Failure(f"an error, and yet an output\n{everything}")


def invoke(command: list[object], main: Callable[[list[str]], int] = main) -> tuple[int, str, str]:
    """`onegraph command` in this process, for at most SECONDS: status, stdout, stderr. `main`: of another program."""

    def ring(signum: int, frame: FrameType | None) -> None:
        raise Hang

    out, errors = io.StringIO(), io.StringIO()
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    stdin, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(b"from stdin"))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), descriptor_2() as below:
            status = main([str(word) for word in command])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.stdin = stdin
    return status, out.getvalue(), errors.getvalue() + below[0]


@contextlib.contextmanager
def descriptor_2() -> Iterator[list[str]]:
    """What libraries that are not Python write to stderr: in the list when this is left."""
    found: list[str] = []
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield found
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            found.append(file.read().decode("utf-8", "replace"))


@contextlib.contextmanager
def stopped_after(pieces: int) -> Iterator[None]:
    """Quantization stops as if interrupted when it has kept so many pieces."""
    from onegraph.quant.partial import Partial

    save, count = Partial.save, 0

    def counted(self: Partial, *args: object, **kwargs: object) -> None:
        nonlocal count
        save(self, *args, **kwargs)
        count += 1
        if count == pieces:
            raise KeyboardInterrupt

    Partial.save = counted
    try:
        yield
    finally:
        Partial.save = save


__all__ = ["Failure", "Fuzzer", "damage_json", "invoke", "judge", "stopped_after"]
