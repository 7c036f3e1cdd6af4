"""A process that is killed at a random time, started again, and looked at: what `tests/kills.py` does to a command."""

from __future__ import annotations

import collections
import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from onegraph.engine.record import Row

SIGNALS = (signal.SIGKILL,) * 7 + (signal.SIGTERM,) * 2 + (signal.SIGINT,)
REPO = Path(__file__).parent.parent.parent
SECONDS = 120  # no start takes so long: what does hangs
PROMPT = 30.0  # seconds in which a signal that can be answered must have ended the process, on a machine that is busy
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: whom a killed process leaves behind becomes our child
CHAIN = 10  # kills in a row, at most, before a job may come to its end


class Failure(AssertionError):
    """Something that must not be after a kill."""


def need(holds: object, says: str) -> None:
    if not holds:
        raise Failure(says)


def children() -> set[int]:
    """The processes whose parent this one is."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found.update(map(int, (task / "children").read_text().split()))
    return found


@dataclass
class Tally:
    """What was done to one command, as its raw line has it."""

    kills: int = 0
    phases: collections.Counter[str] = field(default_factory=collections.Counter)
    signals: collections.Counter[str] = field(default_factory=collections.Counter)
    starts: int = 0
    ended_first: int = 0
    slowest_exit_s: float = 0.0
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    found: list[str] = field(default_factory=list)

    def row(self) -> Row:
        about = {"kills": self.kills, "phases": dict(self.phases), "signals": dict(self.signals)}
        about |= {"starts": self.starts, "ended_first": self.ended_first, **self.counts}
        return about | {"slowest_exit_s": round(self.slowest_exit_s, 2), "found": self.found}


class Process:
    """`python -m PROGRAM WORDS` in the checkout, with its output and its temporary files in `folder`."""

    def __init__(self, folder: Path, program: str, words: list[str]) -> None:
        self.out, self.err, temporary = folder / "stdout", folder / "stderr", folder / "tmp"
        temporary.mkdir(exist_ok=True)
        # A shell's background job inherits that SIGINT is ignored, and would hand that on.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
        self._others = children()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"}
        with self.out.open("w") as out, self.err.open("w") as err:
            command = [sys.executable, "-m", program, *words]
            self._process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, cwd=REPO)
        self.began = time.monotonic()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def until(self, fine: Callable[[], object], seconds: float = SECONDS) -> bool:
        """Whether it became `fine` while this ran. Raises Failure where neither happens."""
        deadline = time.monotonic() + seconds
        while not fine():
            if not self.running:
                return bool(fine())
            need(time.monotonic() < deadline, f"still running after {seconds:.0f} s: {self.said()}")
            time.sleep(0.0005)  # some phases last milliseconds
        return True

    def lives(self, seconds: float) -> bool:
        """Whether it still runs after so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.running

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self, seconds: float = SECONDS) -> int:
        """The status; what has not ended by then is killed and a Failure. Nothing that it started may outlive it."""
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise Failure(f"still running after {seconds:.0f} s: {self.said()}") from None
        deadline = time.monotonic() + PROMPT
        while left := children() - self._others:
            need(time.monotonic() < deadline, f"processes that it started outlive it: {left}")
            for pid in left:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)
        return status

    def said(self) -> str:
        return self.err.read_text(errors="replace")[-600:]


class Job(ABC):
    """One command. `phases` are in their order; the first begins with the process."""

    name: str
    program = "onegraph"
    phases: tuple[str, ...]
    ends = 0  # the status of an undisturbed run
    until_told = False  # whether it runs until SIGTERM, which is its end as well then

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng, self.tally = folder, rng, Tally()
        self.times = dict.fromkeys(self.phases, 0.0)  # seconds that an undisturbed run is in each
        self.since = 0.0
        self.process: Process | None = None

    @abstractmethod
    def words(self) -> list[str]:
        """The command line."""

    @abstractmethod
    def phase(self) -> str:
        """Where the process is now, by what can be seen of it."""

    @abstractmethod
    def undisturbed(self) -> None:
        """Runs once, and notes the result and the times."""

    @abstractmethod
    def after_kill(self) -> bool:
        """Whether there is something to go on with. Raises Failure for what must not be."""

    @abstractmethod
    def after_end(self) -> None:
        """Raises Failure where the result of a run that came to its end is not that of the undisturbed one."""

    def start(self) -> Process:
        self.tally.starts += 1
        self.since = time.time() - 0.01  # a file's time may be that of the last tick
        self.process = Process(self.folder, self.program, self.words())
        return self.process

    def stop(self) -> None:
        """Ends what runs still, as where this is interrupted itself."""
        if self.process is not None and self.process.running:
            self.process.send(signal.SIGKILL)
            self.process.end()

    def fresh(self, path: Path) -> bool:
        """Whether this process has written there."""
        with suppress(FileNotFoundError):
            return path.stat().st_ctime > self.since
        return False

    def timed(self, process: Process) -> None:
        """Watches a run to its end and notes how long it is in each phase."""
        last = time.monotonic()
        while process.running:
            now, here = time.monotonic(), self.phase()
            self.times[here] += now - last
            last = now
            time.sleep(0.0005)
        need(process.end() == self.ends, f"undisturbed, it fails: {process.said()}")

    def aim(self) -> tuple[str, float]:
        """A phase, and seconds after its beginning."""
        if self.rng.random() < 0.5:
            return self.phases[0], self.rng.uniform(0, sum(self.times.values()))
        phase = self.rng.choice(self.phases)
        return phase, self.rng.uniform(0, self.times[phase])

    def strike(self) -> bool:
        """Starts it and sends one signal at one time; False where it had come to its end by itself."""
        (aimed, delay), order = self.aim(), self.phases.index
        process = self.start()
        process.until(lambda: order(self.phase()) >= order(aimed))
        elapsed = 0.0 if order(aimed) else time.monotonic() - process.began
        if not process.lives(delay - elapsed):
            return self.came_to_its_end(process.end(), process)
        here, number, sent = self.phase(), self.rng.choice(SIGNALS), time.monotonic()
        process.send(number)
        status = process.end(SECONDS if number == signal.SIGKILL else PROMPT)
        if status == 0 and not self.until_told:
            need(here in self.phases[-2:], f"{signal.Signals(number).name} while {here}: it goes on to its end")
            return self.came_to_its_end(status, process)
        self.answered(process, number, status, time.monotonic() - sent)
        self.tally.kills += 1
        self.tally.phases[here] += 1
        self.tally.signals[signal.Signals(number).name] += 1
        return True

    def came_to_its_end(self, status: int, process: Process) -> bool:
        need(status == self.ends, f"it ends by itself with status {status}: {process.said()}")
        self.tally.ended_first += 1
        return False

    def answered(self, process: Process, number: int, status: int, seconds: float) -> None:
        said = process.said()
        if number != signal.SIGKILL:
            self.tally.slowest_exit_s = max(self.tally.slowest_exit_s, seconds)
        if status == 130 and number == signal.SIGINT:
            need(said.splitlines()[-1].startswith("onegraph: interrupted"), f"it does not say what ended it: {said}")
        else:
            need(status in (-number, self.ends), f"{signal.Signals(number).name} ends it with {status}: {said}")
        need("Traceback" not in said, f"{signal.Signals(number).name}: a traceback: {said}")

    def run(self, count: int) -> None:
        """Kills it `count` times. What is found is noted, and the next job begins anew."""
        self.undisturbed()
        while self.tally.kills < count:
            self.renew()
            try:
                for _ in range(min(self.rng.randint(1, CHAIN), count - self.tally.kills)):
                    if not (self.strike() and self.after_kill()):
                        break
                self.finish()
            except Failure as failure:
                self.tally.found.append(str(failure))
                print(f"FAILED {self.name}, kill {self.tally.kills}: {failure}", file=sys.stderr, flush=True)
                need(len(self.tally.found) < 10, "too much is found; given up")
            print(f"{self.name}: {self.tally.kills} of {count}", file=sys.stderr, flush=True)

    def renew(self) -> None:  # noqa: B027 (most jobs need nothing)
        """Another place to work at."""

    def finish(self) -> None:
        """The last start, which nothing disturbs."""
        process = self.start()
        need(process.end() == self.ends, f"started again, it fails: {process.said()}")
        self.after_end()
        self.tally.counts["ended_well"] += 1
        need(not list((self.folder / "tmp").iterdir()), "temporary files are left")
