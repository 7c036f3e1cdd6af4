"""docs/performance.svg from the raw lines in benchmarks/results: the linear and the decode step on a log scale.

    python3 -m pip install matplotlib && python3 benchmarks/plot.py --out docs/performance.svg

Left: one linear of 4096 -> 14336 at one token. Right: the decode step of the Llama-3-8B shape, 1k context, greedy. Of
several lines that measured the same, the last one counts.
"""

import argparse
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
BANDWIDTH = 4.27e12  # bytes per second of a copying kernel on an H200; step lines carry no roof of their own
BODY, HEAD = 6.98e9, 0.525e9  # weights of the Llama-3-8B shape: its blocks, and its head, which is at 4 bits here
COLOURS = {"onegraph": "#c2410c", "torch dense": "#1d4ed8", "vLLM": "#1d4ed8", "humming": "#0f766e"}


def lines() -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(RESULTS.glob("*.jsonl")) for line in file.read_text().splitlines()]


def label(row: dict[str, Any]) -> str:
    """The same for one contestant in every file."""
    if row["name"].startswith("humming"):
        return "humming int, group 128"
    return "onegraph, E8P" if row["name"].startswith("onegraph e8p") else row["name"]


def colour(name: str) -> str:
    return next((c for start, c in COLOURS.items() if name.startswith(start)), "#9ca3af")


def series(axes: Any, points: dict[str, dict[int, float]], unit: str) -> None:
    for name, values in sorted(points.items(), key=lambda item: not item[0].startswith("onegraph")):
        bits = sorted(values)
        ours = name.startswith("onegraph")
        axes.plot(
            bits, [values[b] for b in bits], marker="o", label=name, color=colour(name), linewidth=2.5 if ours else 1
        )
        for b in bits if ours or len(bits) == 1 else ():
            axes.annotate(f"{values[b]:.3g} {unit}", (b, values[b]), xytext=(0, 7), textcoords="offset points",
                          fontsize=8, color=colour(name), ha="center")  # fmt: skip


def frame(axes: Any, title: str, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([2, 3, 4, 16], ["2", "3", "4", "16"])
    axes.minorticks_off()
    axes.set_xlim(1.7, 19)
    axes.set_xlabel("bits a weight")
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=7.5, frameon=False)


def points() -> tuple[dict[str, dict[int, float]], dict[str, dict[int, float]]]:
    """By contestant and bits a weight: microseconds of the linear, tokens per second of the step."""
    linear: dict[str, dict[int, float]] = {}
    step: dict[str, dict[int, float]] = {}
    for row in lines():
        if row["bench"] == "linear" and (row["k"], row["n"], row["tokens"]) == (4096, 14336, 1):
            linear.setdefault(label(row), {})[row["bits"]] = row["us"]
        ours = {"bench": "step", "shape": "llama-3-8b", "batch": 1, "context": 1024, "temperature": 0.0}
        if ours.items() <= row.items():
            step.setdefault(label(row), {})[row["bits"]] = row["tokens_per_second"]
        if {"bench": "vllm_decode", "name": "bf16", "batch": 1, "context": 128}.items() <= row.items():
            step.setdefault("vLLM, bf16, context 128", {})[16] = row["tokens_per_second"]
    return linear, step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "onegraph"  # the same bytes from the same lines
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2))
    linear, step = points()
    bits = [2, 3, 4, 16]
    series(left, linear, "us")
    left.plot(bits, [4096 * 14336 * b / 8 / BANDWIDTH * 1e6 for b in bits], "k--", linewidth=1, label="memory roof")
    frame(left, "linear 4096 -> 14336, one token, H200", "microseconds (lower is better)")
    series(right, step, "tok/s")
    sizes = [(BODY + HEAD) * 2 if b == 16 else BODY * b / 8 + HEAD / 2 for b in bits]
    right.plot(bits, [BANDWIDTH / size for size in sizes], "k--", linewidth=1, label="memory roof")
    frame(right, "decode step, Llama-3-8B shape, 1k context, B = 1, H200", "tokens per second (higher is better)")
    figure.tight_layout()
    figure.savefig(args.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
