"""Make four texts that have nothing to do with the calibration corpus, to measure quality on.

    python benchmarks/unrelated.py OUT_DIR --model SmolLM2-135M-Instruct.Q4_1.gguf

prose.txt: manuals of Debian packages (`PROSE`). code.txt: sources of packages that torch depends on. chat.jsonl: what
the model itself answers to `PROMPTS` at temperature 0.7. languages.txt: manual pages in German and Russian. The files
differ from machine to machine with the versions of these packages, so lines of results have their SHA-256. They are
other people's text and are not committed.
"""

import argparse
import gzip
import hashlib
import json
import os
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from onegraph.api.llm import LLM

DOC, MAN = Path("/usr/share/doc"), Path("/usr/share/man")
PROSE = (
    "man-db/man-db-manual.txt.gz", "python3/python-policy.txt.gz", "dpkg/spec/triggers.txt",
    "libpng16-16/libpng-manual.txt.gz", "libjpeg-dev/structure.txt.gz", "liblzma-dev/xz-file-format.txt.gz",
    "fontconfig/fontconfig-user.txt.gz", "libxdmcp-dev/xdmcp.txt.gz", "git/contrib/subtree/git-subtree.txt",
    "git/RelNotes/2.28.0.txt",
)  # fmt: skip
CODE = "jinja2", "networkx", "fsspec", "mpmath"
PAGES = {"de": ("man", "ps", "dpkg-source", "xz", "vim"), "ru": ("man", "vim", "killall", "passwd", "xxd")}
PIECE = 4000  # characters of a file at most, from its middle on: front matter and contents are lists
PROMPTS = (
    "Why do leaves change color in autumn?",
    "Write a limerick about a penguin who works in a bank.",
    "My car makes a clicking noise when I turn left. What could it be?",
    "Explain recursion to a ten-year-old.",
    "Give me a packing list for a week of hiking in Scotland.",
    "What is the difference between weather and climate?",
    "Write a Python function that returns the second largest number in a list.",
    "Summarize the plot of Romeo and Juliet in three sentences.",
    "How can I fall asleep faster?",
    "Translate 'Where is the train station?' into Spanish, French and Italian.",
    "What are the pros and cons of electric bikes?",
    "Write a short product description for a wooden toy train.",
    "A shirt costs 40 dollars after a discount of 20 percent. What did it cost before?",
    "How does a refrigerator keep food cold?",
    "Draft a message to my team that the meeting moves from Tuesday to Thursday.",
    "Name five inventions of the 19th century and who made them.",
    "What should I say at my sister's wedding? Keep it under a minute.",
    "Explain what a hash table is and when to use one.",
    "Plan a birthday party for twelve children on a rainy day.",
    "Is it safe to eat bread with a small spot of mold?",
    "Write the opening paragraph of a detective story set in a lighthouse.",
    "How do I remove a red wine stain from a white carpet?",
    "Compare the Roman Empire and the Han Dynasty in a table.",
    "What is inflation, and why do central banks care about it?",
)


def texts(files: list[Path]) -> Iterator[str]:
    """A piece of each file."""
    for file in files:
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8", "replace")
        start = max(0, len(text) - PIECE) // 2
        yield text[text.rfind("\n", 0, start + 1) + 1 : start + PIECE]


def pages(language: str, names: tuple[str, ...]) -> Iterator[str]:
    """Manual pages as a terminal shows them."""
    for name in names:
        page = next((MAN / language / "man1").glob(f"{name}.1*"))
        environment = os.environ | {"MANWIDTH": "100", "LC_ALL": "C.UTF-8", "MAN_KEEP_FORMATTING": ""}
        shown = subprocess.run(
            ["man", "-E", "UTF-8", "-P", "cat", "-l", str(page)],
            capture_output=True,
            text=True,
            env=environment,
            check=True,
        ).stdout
        start = max(0, len(shown) - PIECE) // 2
        yield shown[start : start + PIECE]


def chats(model: str, tokens: int) -> Iterator[str]:
    """Conversations of one turn as JSON lines: what the unquantized model answers to `PROMPTS`."""
    llm = LLM(model, max_num_seqs=len(PROMPTS), max_model_len=tokens + 256)
    prompts = [llm.tokenizer.chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    answers = llm.generate(prompts, max_tokens=tokens, temperature=0.7, top_p=1.0, seed=0)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": str(answer)}]
        yield json.dumps({"messages": turns}, ensure_ascii=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True, help="unquantized, which writes the chats")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer at most")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    library = Path(sysconfig.get_path("purelib"))
    sources = [sorted((library / name).rglob("*.py")) for name in CODE]
    code = [
        file for files in sources for file in files if file.stat().st_size > 2 * PIECE and "tests" not in file.parts
    ]
    found = {
        "prose.txt": "\n\n".join(texts([DOC / name for name in PROSE])),
        "code.txt": "\n\n".join(texts(code[:: max(1, len(code) // 16)])),
        "languages.txt": "\n\n".join(text for language, names in PAGES.items() for text in pages(language, names)),
        "chat.jsonl": "\n".join(chats(args.model, args.tokens)),
    }
    for name, text in found.items():
        (args.out / name).write_text(text, encoding="utf-8")
        print(f"{name}: {len(text)} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
