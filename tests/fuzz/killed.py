"""What `onegraph quantize`, `onegraph serve` and `tools soak` hold when they are killed."""

from __future__ import annotations

import json
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from . import tiny
from .killing import PROMPT, Job, Process, Tally, need
from .run import invoke


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


class Quantize(Job):
    """The result is not there or whole, and `verify` refuses what is unfinished; started again, it ends with the bytes
    of an undisturbed run and leaves nothing beside them."""

    name = "quantize"
    phases = ("loading", "blocks", "writing", "clearing")
    place = 0

    @property
    def out(self) -> Path:
        return self.folder / f"job{self.place}" / "out"

    @property
    def unfinished(self) -> tuple[Path, Path]:
        return self.out.with_name("out.partial"), self.out.with_name(".out.tmp")

    def words(self) -> list[str]:
        how = [
            "--bits=3",
            "--lm-head=4",
            "--recipe=good",
            "--num-calibration-tokens=1024",
            "--calibration-seq-len=64",
            "--device=cpu",
        ]
        return ["quantize", str(self.folder / "model"), str(self.out), *how]

    def phase(self) -> str:
        partial, temporary = self.unfinished
        if self.out.exists():
            return "clearing"
        if self.fresh(temporary):
            return "writing"
        return "blocks" if self.fresh(partial / "lock") else "loading"

    def renew(self) -> None:
        shutil.rmtree(self.out.parent, ignore_errors=True)
        self.place += 1

    def undisturbed(self) -> None:
        self.timed(self.start())
        self.whole = content(self.out)

    def after_kill(self) -> bool:
        if self.out.exists():
            need(content(self.out) == self.whole, "the result is there and not whole")
            need(invoke(["verify", self.out])[0] == 0, "verify refuses a whole result")
        others = {file.name for file in self.out.parent.glob("*")} - {"out", "out.partial", ".out.tmp"}
        need(not others, f"files that nobody knows: {others}")
        for folder in self.unfinished:
            if folder.exists() and content(folder) != self.whole:
                status, said, _ = invoke(["verify", folder])
                need(status, f"verify takes {folder.name} with {sorted(content(folder))} for a result: {said}")
        return not self.out.exists()

    def finish(self) -> None:
        if self.out.exists():  # killed behind the end
            process = self.start()
            need(process.end() == 2, f"a result that is there is not refused: {process.said()}")
            partial = self.unfinished[0]
            if partial.exists():
                need(str(partial) in process.said(), f"{partial.name} is left and nobody told: {process.said()}")
                self.tally.counts["leftovers_told"] += 1
                shutil.rmtree(partial)
            self.after_end()
        else:
            super().finish()

    def after_end(self) -> None:
        need(content(self.out) == self.whole, "the bytes are not those of an undisturbed run")
        left = sorted(file.name for file in self.out.parent.iterdir())
        need(left == ["out"], f"it leaves {left}")


class Soak(Job):
    """The file holds whole rounds, those of an undisturbed run and never fewer than before, and perhaps a torn last
    line; started again, it ends with all of them, each once, and the same verdict. Until a run that goes on has told of
    its first round nothing shows that it is loaded."""

    name = "soak"
    program = "tools"
    phases = ("loading", "rounds", "writing")
    steps, place, seen = 192, 0, 0

    @property
    def out(self) -> Path:
        return self.folder / f"soak{self.place}"

    def words(self) -> list[str]:
        how = ["--device=cpu", "--context=64", f"--steps={self.steps}", "--json"]
        return ["soak", str(self.folder / "model"), "--out", str(self.out), *how]

    def phase(self) -> str:
        path = self.out / "rounds.jsonl"
        lines = path.read_bytes().count(b"\n") if path.exists() else 0
        if lines == 1 + self.steps // (64 - 16):
            return "writing"
        return "rounds" if self.fresh(path) or (self.folder / "stderr").stat().st_size else "loading"

    def renew(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        self.place, self.seen = self.place + 1, 0

    def undisturbed(self) -> None:
        self.timed(self.start())
        self.rounds, self.verdict = self.read(), self.told()
        need(len(self.rounds) == self.steps // (64 - 16), "an undisturbed run has other rounds")

    def told(self) -> dict[str, Any]:
        found = json.loads((self.folder / "stdout").read_text())
        return {key: value for key, value in found.items() if key != "memory_growth"}

    def read(self) -> list[dict[str, Any]]:
        """The whole rounds of the file, without what is a process's own."""
        path = self.out / "rounds.jsonl"
        lines = path.read_bytes().split(b"\n")[1:-1] if path.exists() else []
        return [{k: v for k, v in json.loads(line).items() if k not in ("memory", "run")} for line in lines]

    def after_kill(self) -> bool:
        found = self.read()
        need(found == self.rounds[: len(found)], f"rounds differ from those of an undisturbed run: {found}")
        need(len(found) >= self.seen, f"{self.seen} rounds were written and {len(found)} are left")
        self.seen = len(found)
        others = {file.name for file in self.out.glob("*")} - {"rounds.jsonl", "plot.svg", ".plot.svg.tmp"}
        need(not others, f"files that nobody knows: {others}")
        return True

    def after_end(self) -> None:
        need(self.read() == self.rounds, "the rounds are not those of an undisturbed run")
        need(self.told() == self.verdict, f"the verdict is {self.told()}, undisturbed {self.verdict}")
        left = sorted(file.name for file in self.out.iterdir())
        need(left == ["plot.svg", "rounds.jsonl"], f"it leaves {left}")


class User(threading.Thread):
    """Asks one question after the other once the server is there, until it is not. `got` is the text of each answer
    and whether it was whole; `wrong` is what a client must not see."""

    def __init__(self, served: Serve, process: Process, questions: list[dict[str, Any]]) -> None:
        super().__init__(daemon=True)
        self.served, self.process, self.questions = served, process, questions
        self.got: list[tuple[str, bool]] = []
        self.wrong = ""

    def run(self) -> None:
        try:
            while not self.served.url():
                if not self.process.running:
                    return
                time.sleep(0.005)
            for question in self.questions:
                if not self.ask(question):
                    return
        except httpx.TimeoutException:
            self.wrong = f"a client waits for {PROMPT} s"
        except Exception as error:
            self.wrong = f"a client meets {type(error).__name__}: {error}"

    def ask(self, question: dict[str, Any]) -> bool:
        """Whether the whole answer came."""
        text, whole = "", False
        try:
            with httpx.stream("POST", f"{self.served.url()}/completions", json=question, timeout=PROMPT) as answer:
                if answer.status_code == 503:  # it ends
                    return False
                answer.raise_for_status()
                for line in answer.iter_lines():
                    event = line.removeprefix("data: ")
                    if "error" in (found := json.loads(event) if event[:1] == "{" else {}):
                        break
                    text += found["choices"][0]["text"] if found else ""
                    whole = whole or event == "[DONE]"
                else:
                    self.wrong = "" if whole else "a stream ends early without an error"
        except httpx.TimeoutException:
            raise
        except httpx.TransportError:
            whole = False
        self.got.append((text, whole))
        return whole


class Serve(Job):
    """A client sees the answer of an undisturbed run, or its beginning and an error, and soon; the port is free at
    once, and started again there it answers the same."""

    name = "serve"
    phases = ("loading", "answering", "ending")
    until_told = True  # undisturbed, it is told to end when everybody has been answered
    port = 0

    def __init__(self, folder: Path, rng: random.Random) -> None:
        super().__init__(folder, rng)
        self.users: list[User] = []
        self.wanted: list[list[tuple[str, bool]]] = []
        self.closing = threading.Event()

    def words(self) -> list[str]:
        few = [
            "--max-num-seqs=3",
            "--max-model-len=96",
            "--kv-cache-tokens=160",
            "--grace=1",
        ]  # they wait and are preempted
        # Exact, since tokens are compared: in int8 a row's rounding follows from how many are computed beside it.
        how = ["--device=cpu", f"--port={self.port}"]
        return ["serve", str(self.folder / "model"), *few, *how]

    def url(self) -> str:
        """Where it listens; "" as long as it does not say."""
        whole = (self.folder / "stderr").read_text().rpartition("\n")[0].splitlines()
        return next((line.split()[-1] for line in whole if line.startswith("serving ")), "")

    def phase(self) -> str:
        if self.closing.is_set():
            return "ending"
        return "answering" if self.url() else "loading"

    def start(self) -> Process:
        process = super().start()
        ask = {"model": "model", "max_tokens": 70, "stream": True}
        how = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}, {"temperature": 0.9, "seed": 6, "min_p": 0.05}]
        texts = ("the thing", "in the inn", "a", "12 hats and the thing")
        self.users = [User(self, process, [ask | {"prompt": text} | each for each in how]) for text in texts]
        for user in self.users:
            user.start()
        self.closing = threading.Event()
        # In half of the runs it is told to end amid the answers, so that it is killed while it ends, too.
        soon = self.rng.uniform(0, self.times["answering"]) if self.wanted and self.rng.random() < 0.5 else None
        threading.Thread(target=self.close, args=(process, self.users, self.closing, soon), daemon=True).start()
        return process

    def close(self, process: Process, users: list[User], closing: threading.Event, soon: float | None) -> None:
        if soon is None or not process.until(self.url):
            for user in users:
                user.join()
        else:
            process.lives(soon)
        closing.set()
        process.send(signal.SIGTERM)

    def undisturbed(self) -> None:
        self.timed(self.start())
        self.port = int(self.url().split(":")[-1].removesuffix("/v1"))
        self.wanted = [user.got for user in self.users]
        self.after_end()

    def after_kill(self) -> bool:
        for user, wanted in zip(self.users, self.wanted, strict=True):
            user.join(2 * PROMPT)
            need(not user.is_alive(), "a client hangs")
            need(not user.wrong, user.wrong)
            for (text, whole), (right, _) in zip(user.got, wanted, strict=False):
                need(right.startswith(text) and (text == right or not whole), f"{text!r} was {right!r} before")
                self.tally.counts["answers_whole" if whole else "answers_cut"] += 1
        return True

    def finish(self) -> None:
        kept, self.wanted = self.wanted, []  # nothing ends it early
        process = self.start()
        self.wanted = kept
        need(process.end() == self.ends, f"started again, it fails: {process.said()}")
        self.after_kill()
        self.after_end()

    def after_end(self) -> None:
        got = [user.got for user in self.users]
        need(got == self.wanted, f"answers are {got}; before, they were {self.wanted}")
        need(all(whole for got in self.wanted for _, whole in got), "an undisturbed run does not answer")


JOBS: dict[str, type[Job]] = {job.name: job for job in (Quantize, Serve, Soak)}


def kill(what: str, count: int, seed: int, folder: Path) -> Tally:
    """Kills a command `count` times, in a new directory `folder`."""
    folder.mkdir()
    tiny.write_model(folder / "model")
    job = JOBS[what](folder, random.Random(f"{what} {seed}"))
    try:
        job.run(count)
    finally:
        job.stop()
    return job.tally
