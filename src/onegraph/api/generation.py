"""`eval --generation`: what a model writes, not how likely it finds a text.

A low-bit model can keep its likelihood and still fail when it writes: it leaves the reference's text early, runs into
loops, or does not do what it is told. Three measurements, all greedy: continuations of pieces of a text, held to a
reference's token by token; how much of them repeats itself; and short instructions whose answers a rule judges.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onegraph.api import Progress
from onegraph.api.llm import LLM

PROMPT, ANSWER = 192, 64  # tokens of a piece of the text, more than a cache in codes keeps exact; and to continue it
PIECES = 32
GRAM = 4
CYCLE, TAIL = 12, 32  # a loop: the last TAIL tokens repeat with a period of at most CYCLE
SPOKEN = 96  # tokens of an answer at most
AT_ONCE = 8


def contains(*words: str) -> Callable[[str], bool]:
    """One of these words stands in the answer, as a word, whatever its case."""
    found = re.compile("|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in words), re.IGNORECASE)
    return lambda answer: found.search(answer) is not None


def only(*words: str) -> Callable[[str], bool]:
    """The answer is one of these words, but for case, marks and spaces around it."""
    return lambda answer: answer.strip().strip("\"'.!*` ").lower() in words


def matches(pattern: str) -> Callable[[str], bool]:
    """The pattern is found in the answer, without regard to lines."""
    found = re.compile(pattern, re.DOTALL)
    return lambda answer: found.search(answer) is not None


def lines(count: int) -> Callable[[str], bool]:
    """The answer has so many lines that say something."""
    return lambda answer: sum(bool(re.search(r"\w", line)) for line in answer.splitlines()) == count


def has_keys(*keys: str) -> Callable[[str], bool]:
    """The answer is, or holds, one JSON object with these keys."""

    def judge(answer: str) -> bool:
        start, end = answer.find("{"), answer.rfind("}")
        try:
            found = json.loads(answer[start : end + 1])
        except ValueError:
            return False
        return isinstance(found, dict) and set(keys) <= found.keys()

    return judge


@dataclass(frozen=True)
class Task:
    """An instruction, and whether an answer does what it says."""

    prompt: str
    judge: Callable[[str], bool]


TASKS = (
    Task("What is the capital of France?", contains("Paris")),
    Task("What is the capital of Japan?", contains("Tokyo")),
    Task("Which planet is closest to the Sun?", contains("Mercury")),
    Task("What is the chemical formula of water?", contains("H2O", "H₂O")),
    Task("How many days are in a week? Answer with a number.", contains("7", "seven")),
    Task("How many legs does a spider have?", contains("8", "eight")),
    Task("What is 2 + 3?", contains("5", "five")),
    Task("What is 7 times 6?", contains("42")),
    Task("What is 100 minus 1?", contains("99")),
    Task("What comes after Monday?", contains("Tuesday")),
    Task("What is the opposite of hot?", contains("cold", "cool")),
    Task("What is the past tense of the verb go?", contains("went")),
    Task("What color do you get when you mix blue and yellow?", contains("green")),
    Task("Which is larger, an elephant or a mouse?", contains("elephant")),
    Task("Is ice cold? Answer with one word, yes or no.", only("yes")),
    Task("Can fish fly to the moon? Answer with one word, yes or no.", only("no")),
    Task("Repeat the word banana and nothing else.", only("banana")),
    Task("Write the word hello in capital letters and nothing else.", matches(r"^\W*HELLO\W*$")),
    Task("Name three fruits, each on a line of its own, and nothing else.", lines(3)),
    Task("Count from 1 to 5.", matches(r"1\W+2\W+3\W+4\W+5")),
    Task('Answer with a JSON object that has the keys "name" and "age", and nothing else.', has_keys("name", "age")),
    Task("Write a Python function named add that returns the sum of a and b.", matches(r"def add\(.*return")),
    Task("Translate the Spanish word gato into English.", contains("cat")),
    Task("Finish the sentence: The sun rises in the", contains("east")),
)  # fmt: skip


def repetition(tokens: Sequence[int], size: int = GRAM) -> float:
    """The share of the runs of `size` tokens that stood before (seq-rep-n of Welleck et al., arXiv 1908.04319)."""
    grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def looping(tokens: Sequence[int]) -> bool:
    """Whether the end of the text goes round and round."""
    end = tokens[-TAIL:]
    return len(end) == TAIL and any(end[period:] == end[:-period] for period in range(1, CYCLE + 1))


def agreeing(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@dataclass(frozen=True)
class Written:
    """What one model wrote: continuations, tokens of each, and an answer to each of TASKS, None where it has no chat
    template."""

    continuations: list[list[int]]
    answers: list[str] | None


def write(
    path: str,
    text: str,
    *,
    kv: str,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    pieces: int = PIECES,
    tasks: Sequence[Task] = TASKS,
) -> Written:
    """Raises ValueError where the text is too short."""
    named: Any = str(dtype).removeprefix("torch.")
    with LLM(path, device=str(device), dtype=named, kv_cache_dtype=kv, max_num_seqs=AT_ONCE) as llm:
        ids = llm.tokenizer.encode(text)
        step = (len(ids) - PROMPT) // pieces
        if step < 1:
            raise ValueError(
                f"generation: the text has {len(ids)} tokens; {PROMPT + pieces} are needed, and some thousand to mean "
                "much"
            )
        spoken = llm.tokenizer.template is not None
        total = pieces + (len(tasks) if spoken else 0)
        progress("writing", 0, total)
        found: list[list[int]] = []
        for first in range(0, pieces, AT_ONCE):
            some = [ids[i * step : i * step + PROMPT] for i in range(first, min(first + AT_ONCE, pieces))]
            found += [each.token_ids for each in llm.generate(some, max_tokens=ANSWER, temperature=0.0)]
            progress("writing", len(found), total)
        if not spoken:
            return Written(found, None)
        answers: list[str] = []
        for first in range(0, len(tasks), AT_ONCE):
            asked = [[{"role": "user", "content": task.prompt}] for task in tasks[first : first + AT_ONCE]]
            answers += [each.text for each in llm.chat(asked, max_tokens=SPOKEN, temperature=0.0)]
            progress("writing", pieces + len(answers), total)
        return Written(found, answers)


def judged(written: Written, tasks: Sequence[Task] = TASKS) -> dict[str, Any]:
    """Figures of what one model wrote: `repetition` and `loops` are shares, `done` counts instructions."""
    texts = written.continuations
    done = None
    if written.answers is not None:
        done = [task.judge(answer) for task, answer in zip(tasks, written.answers, strict=True)]
    return {
        "repetition": round(sum(map(repetition, texts)) / len(texts), 4),
        "loops": round(sum(map(looping, texts)) / len(texts), 4),
        "done": None if done is None else sum(done),
        "failed": None if done is None else [task.prompt for task, ok in zip(tasks, done, strict=True) if not ok],
    }


def compared(written: Written, reference: Written) -> dict[str, float]:
    """`same`: the share of continuations that are the reference's to the end; `agreeing`: tokens until the first other
    one, the mean."""
    pairs = list(zip(written.continuations, reference.continuations, strict=True))
    return {
        "same": round(sum(a == b for a, b in pairs) / len(pairs), 4),
        "agreeing": round(sum(agreeing(a, b) for a, b in pairs) / len(pairs), 2),
    }


def evaluate_generation(model: str, text: str, *, reference: str | None, kv: str, **how: Any) -> dict[str, Any]:
    """Figures of what `model` writes, by name, and of the `reference`, whose cache is exact; see `write`."""
    mine = write(model, text, kv=kv, **how)
    result: dict[str, Any] = {"pieces": len(mine.continuations), "tasks": len(TASKS), "model": judged(mine)}
    if reference is not None or kv != "exact":
        other = write(reference or model, text, kv="exact", **how)
        result |= {"reference": judged(other), **compared(mine, other)}
    return result
