"""Make the two texts of the quality figures, from the standard library of the Python that runs this (3.11.7 was used).

    python benchmarks/texts.py OUT_DIR

calibration.txt: the docstrings of the standard library's modules, classes and functions of 200 characters or more, in
the order of files and lines, each once; test suites, idlelib and pydoc_data are left out. evaluation.txt: the help
topics of `pydoc_data.topics` (the language reference). The two come from different documents and share no page.
"""

import argparse
import ast
import hashlib
import inspect
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SKIP = {"test", "tests", "idlelib", "pydoc_data", "site-packages", "lib2to3", "turtledemo", "ensurepip", "__pycache__"}


def docstrings(root: Path) -> Iterator[str]:
    for file in sorted(root.rglob("*.py")):
        if SKIP & set(file.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) >= 200:
                    yield inspect.cleandoc(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    from pydoc_data import topics

    texts = {
        "calibration.txt": "\n\n".join(dict.fromkeys(docstrings(Path(sysconfig.get_paths()["stdlib"])))),
        "evaluation.txt": "\n\n".join(topics.topics[key] for key in sorted(topics.topics)),
    }
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
        print(f"{name}: {len(text)} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
