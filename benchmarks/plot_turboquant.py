"""The figure of docs/turboquant.md from the raw lines: what a KV cache setting costs against what it takes.

python3 -m pip install matplotlib && python3 benchmarks/plot_turboquant.py --out docs/turboquant.svg
"""

import argparse
import json
from pathlib import Path

LINES = Path(__file__).parent / "results" / "turboquant-quality-cpu.jsonl"

PLACES = {  # of labels that would lie on others
    "4,mode=full": ("right", (-2, 7)), "k3v4": ("right", (-6, 4)),
    "k3v4,first=2,last=2": ("left", (-34, -13)), "k3v4,window=128": ("left", (6, -4)),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "onegraph"  # the same bytes from the same lines
    figure, axes = plt.subplots(figsize=(7, 4.2))
    rows = [json.loads(line) for line in LINES.read_text().splitlines()]
    for row in rows:
        if "kl" not in row:
            continue
        times = row["exact_token_bytes"] / row["token_bytes"]
        prod, full = "prod" in row["kv"], "full" in row["kv"]
        colour = "#b91c1c" if prod else "#9ca3af" if full else "#c2410c"
        axes.errorbar(times, row["kl"], yerr=2 * row["kl_error"], fmt="s" if prod else "o", color=colour)
        name = row["kv"].removeprefix("turboquant:")
        label = f"{name}  ({100 * row['perplexity_increase']:+.2f} %)"
        side, shift = PLACES.get(name, ("left", (6, 4)))
        how = {"textcoords": "offset points", "fontsize": 8, "color": colour, "ha": side}
        axes.annotate(label, (times, row["kl"]), xytext=shift, **how)
    axes.set_yscale("log")
    axes.set_xlim(2.2, 8.2)
    axes.set_xlabel("tokens in the pages' memory, times those of a bfloat16 cache")
    axes.set_ylabel("KL to exact attention, nats a token (lower is better)")
    tokens, window = next((row["tokens"], row["window"]) for row in rows if "kl" in row)
    axes.set_title(
        f"SmolLM2-135M, {tokens} tokens in windows of {window}; in brackets the change of perplexity", fontsize=9
    )
    axes.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(args.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
