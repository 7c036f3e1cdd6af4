"""What a model still knows of a long text through a TurboQuant KV cache: passkeys, and passages that stand there twice.

    python benchmarks/turboquant_recall.py MODEL TEXT [--context 2048 --documents 1] SETTING... [--out FILE]

A document is `context` tokens of the text, in which four sentences with passkeys and four passages of shuffled tokens
are hidden at even distances; at its end stand the passkeys' questions with their answers, and the passages again. It is
read once, every query sees of earlier tokens what a decode step would, in codes from the first token on, and what the
model finds likeliest is compared with what stands there: an answer is found where greedy decoding would have given it.
"""

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onegraph.api.needle import PLACES
from onegraph.api.tokenizer import Tokenizer
from onegraph.cli.common import pick_device, pick_dtype, read_text
from onegraph.engine.decoder import Decoder
from onegraph.engine.evaluate import read
from onegraph.engine.record import emit, machine
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.turboquant import TurboQuantConfig, parse_kv
from onegraph.models.llama import Llama

HIDDEN = 4  # passkeys of a document, and passages
SENTENCE = "\n\nThe pass key of the {place} is {code}.\n\n"
QUESTION = "\n\nRemember the sentence above: the pass key of the {place} is"
PASSAGE = 64  # tokens
GIVEN = 8  # of a passage that stands there again, before the model is asked to continue it


@dataclass(frozen=True)
class Document:
    """Tokens, and of them: each passkey's answer, each passage where it stands first and where it stands again; in the
    order in which sentences and passages stand in the text."""

    tokens: list[int]
    answers: list[slice]
    first: list[slice]
    again: list[slice]

    @property
    def distances(self) -> list[int]:
        return [two.start - one.start for one, two in zip(self.first, self.again, strict=True)]


def document(tokenizer: Any, text: Sequence[int], seed: int) -> Document:
    """Of as many tokens as `text` has. Raises ValueError where they are too few."""
    rng = random.Random(seed)
    codes = [str(rng.randrange(10**4, 10**5)) for _ in range(HIDDEN)]
    places = rng.sample(PLACES, HIDDEN)
    sentences = [
        tokenizer.encode(SENTENCE.format(place=place, code=code)) for place, code in zip(places, codes, strict=True)
    ]
    questions = [tokenizer.encode(QUESTION.format(place=place)) for place in places]
    answers = [tokenizer.encode(f" {code}") for code in codes]
    space = len(text) - sum(map(len, [*sentences, *questions, *answers])) - 2 * HIDDEN * PASSAGE
    if space < HIDDEN * PASSAGE:
        raise ValueError(f"context {len(text)}: needs {HIDDEN * PASSAGE - space} tokens more to hide things in")
    hay, rest = list(text[:space]), list(text[space:])
    passages = [rng.sample(part, PASSAGE) for part in (rest[i * PASSAGE :][:PASSAGE] for i in range(HIDDEN))]

    tokens: list[int] = []

    def put(part: list[int]) -> slice:
        tokens.extend(part)
        return slice(len(tokens) - len(part), len(tokens))

    first, quarter = [], space // HIDDEN
    for i in range(HIDDEN):
        begin, middle, end = i * quarter, i * quarter + quarter // 2, space if i == HIDDEN - 1 else (i + 1) * quarter
        first.append(put(passages[i]))
        put(hay[begin:middle])
        put(sentences[i])
        put(hay[middle:end])
    asked = {}
    for i in rng.sample(range(HIDDEN), HIDDEN):
        put(questions[i])
        asked[i] = put(answers[i])
    again = [put(passage) for passage in passages]
    return Document(tokens, [asked[i] for i in range(HIDDEN)], first, again)


@dataclass(frozen=True)
class Recall:
    """Of one document. found: whether each passkey is; nats: each answer's negative log-likelihood. first, again: how
    many of the PASSAGE - GIVEN tokens of each passage are likeliest where it stands first, and again."""

    found: list[bool]
    nats: list[float]
    first: list[int]
    again: list[int]


@torch.no_grad()
def recall(model: Decoder, asked: Document, kv: TurboQuantConfig | None) -> Recall:
    tokens = torch.tensor(asked.tokens)
    hidden = read(model, tokens[None], kv, [])[0]

    def predicted(where: slice) -> tuple[Tensor, Tensor]:
        """Whether each token of a slice is the likeliest, and its log-probability."""
        logs = model.logits(hidden[where.start - 1 : where.stop - 1]).float().log_softmax(-1)
        wanted = tokens[where].to(logs.device)
        return logs.argmax(-1) == wanted, logs.gather(1, wanted[:, None])[:, 0]

    def continued(where: slice) -> int:
        return int(predicted(slice(where.start + GIVEN, where.stop))[0].sum())

    answers = [predicted(where) for where in asked.answers]
    return Recall(
        found=[bool(right.all()) for right, _ in answers],
        nats=[-float(logs.sum()) for _, logs in answers],
        first=[continued(where) for where in asked.first],
        again=[continued(where) for where in asked.again],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("settings", nargs="+")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--documents", type=int, default=1, help="each from the next tokens of the text")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    device = pick_device("auto")
    with Checkpoint.open(args.model) as checkpoint:
        tokenizer = Tokenizer(checkpoint)
        model = Llama.load(checkpoint, device, pick_dtype("auto", device), max_context=args.context)
    ids = tokenizer.encode(read_text(args.text))
    if len(ids) < args.documents * args.context:
        parser.error(f"the text has {len(ids)} tokens; {args.documents} documents of {args.context} take more")
    asked = [document(tokenizer, ids[i * args.context :][: args.context], i) for i in range(args.documents)]
    for setting in args.settings:
        started = time.monotonic()
        kv = model.settled(parse_kv(setting))
        rows = [recall(model, one, kv) for one in asked]

        def summed(name: str, rows: list[Recall] = rows) -> list[Any]:
            """Over documents, of each place in the text."""
            return [sum(each) for each in zip(*(getattr(row, name) for row in rows), strict=True)]

        emit(
            {
                "bench": "turboquant recall",
                "kv": setting,
                "tokens": args.context,
                "documents": args.documents,
                "found": summed("found"),
                "nats": round(sum(summed("nats")) / (HIDDEN * args.documents), 3),
                "distances": [round(sum(d) / len(d)) for d in zip(*(one.distances for one in asked), strict=True)],
                "first": summed("first"),
                "again": summed("again"),
                "of": args.documents * (PASSAGE - GIVEN),
                "seconds": round(time.monotonic() - started, 1),
            }
            | {"model": Path(args.model).name}
            | machine(device),
            args.out,
        )


if __name__ == "__main__":
    main()
