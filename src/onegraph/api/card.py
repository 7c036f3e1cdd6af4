"""The README.md of a quantized checkpoint: the model card that the Hugging Face hub shows.

Front matter: https://huggingface.co/docs/hub/model-cards (license, base_model, library_name, tags).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from onegraph.api.hub import NAME
from onegraph.api.plan import NUMBER, Plan
from onegraph.api.quality import plain, section
from onegraph.api.size import human_bytes
from onegraph.formats.checkpoint import CARD, LICENSE, SIDECARS, Checkpoint
from onegraph.formats.extras import command

# What may stand in the front matter of a base model that somebody else wrote, and so in ours
_ENTRY = re.compile(rf"""({"|".join(LICENSE)}):[ \t]*(["']?)((?:https://)?\w[\w.+/-]{{0,200}})\2[ \t]*""", re.ASCII)
_MAX_FRONT = 64 << 10  # bytes of a card in which the front matter ends

NAMED = {"e8p": "E8P", "trellis": "Trellis code"}  # formats that onegraph rounds under calibration
INSTALL = f"""\
```
{command("hub", "serve", "constraints")}
```"""
ONEGRAPH = """\
```
onegraph chat MODEL
onegraph serve MODEL    # OpenAI's API at http://127.0.0.1:8000/v1
onegraph generate MODEL --prompt "The capital of France is"
onegraph eval MODEL --reference BASE --text some.txt --card    # what quantizing cost, written into this card
```"""
UNMEASURED = (
    "Not measured while quantizing: `onegraph eval MODEL --reference BASE --text some.txt --card` measures it and puts "
    "the figures here."
)
TRANSFORMERS = """\
```python
import onegraph.integrations.hf  # registers the format; without it the weights would be random
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("MODEL", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("MODEL")
tokens = tokenizer("The capital of France is", return_tensors="pt").to(model.device)
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=20)[0]))
```"""
VLLM = """\
```
vllm serve MODEL    # with onegraph installed beside it, the format is found by itself
```"""


def license_of(checkpoint: Checkpoint) -> dict[str, str]:
    """license, license_name and license_link as the front matter of a checkpoint's own README.md has them.

    Plain words alone: a license that is written in another way is none here, rather than a guess.
    """
    text = (checkpoint.sidecar(CARD) or b"")[:_MAX_FRONT].decode("utf-8", "replace")
    head = re.match(r"---\r?\n(.*?)\n---", text, re.DOTALL)
    lines = head[1].splitlines() if head else []
    return {match[1]: match[3] for line in lines if (match := _ENTRY.fullmatch(line))}


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a model card is made from.

    plan: of the run. config: the quantization_config that was written. about: onegraph.json. license: `license_of` the
    source. model_type: of config.json.
    """

    plan: Plan
    config: Mapping[str, Any]
    about: Mapping[str, Any]
    license: Mapping[str, str]
    model_type: str

    def __str__(self) -> str:
        return "\n".join([*self._front(), "", *self._text(), ""])

    @property
    def licensed(self) -> str:
        """What to say of the license."""
        return f"license {self.license['license']}" if "license" in self.license else "no license found: add it"

    @property
    def _base(self) -> str:
        return plain(str(self.about["source"]["name"]))

    @property
    def _hub(self) -> bool:
        """Whether the source came from the hub: a directory's name says nothing that the hub would know."""
        return "revision" in self.about["source"] and NAME.fullmatch(self._base) is not None

    def _front(self) -> Iterator[str]:
        yield "---"
        if self._hub:
            yield f"base_model: {self._base}"
        else:
            yield "# base_model: ORG/NAME   (quantized from a file or directory; name it before you publish)"
        yield "base_model_relation: quantized"
        told = dict(self.license)
        link = told.get("license_link", "https://")
        if not link.startswith("https://") and link not in SIDECARS:  # a file of the base's repository
            told["license_link"] = f"https://huggingface.co/{self._base}/blob/main/{link}"
            if not self._hub:
                del told["license_link"]
        yield from (f"{key}: {value}" for key, value in told.items())
        yield "library_name: onegraph"  # transformers alone would go on with random weights
        yield "pipeline_tag: text-generation"
        yield "tags:"
        rates = [f"{self.plan.bits}-bit"] if self.plan.format in NAMED else []
        kind = [self.model_type] if re.fullmatch(r"[\w.-]+", self.model_type, re.ASCII) else []
        yield from (f"- {tag}" for tag in ("onegraph", self.plan.format, "quantized", *rates, *kind))
        yield "---"

    def _text(self) -> Iterator[str]:
        base = f"[{self._base}](https://huggingface.co/{self._base})" if self._hub else f"`{self._base}`"
        named = NAMED.get(self.plan.format)
        what = f"{named} at {self.plan.bits} bits" if named else "NVFP4, in NVIDIA ModelOpt's form"
        yield f"# `{self._base.rpartition('/')[2]}`, {what}"  # code: a directory's name may hold HTML
        yield ""
        revision = self.about["source"].get("revision")
        at = f" at revision `{revision}`" if revision else ""
        yield f"{base}{at}, quantized by onegraph {self.about['versions']['onegraph']}: weights only."
        if not self.license:
            yield "The base's license was not found beside its weights: look it up, it holds for this model too."
        yield ""
        yield from self._sizes()
        yield ""
        yield section(UNMEASURED if self.plan.own else "Not measured: onegraph does not run this model.")
        yield ""
        yield from self._made()
        yield ""
        yield from self._use()

    def _sizes(self) -> Iterator[str]:
        before, after = self.plan.before, self.plan.after
        yield "| | base | this model |"
        yield "|---|---|---|"
        yield f"| weights | {before.stored} | {human_bytes(after.total_bytes)} |"
        linears = f"{before.linear_bits:.2f} | {after.linear_bits:.2f}"
        yield f"| bits per weight, linears of the blocks, scales counted | {linears} |"
        yield f"| bits per weight, whole model | {before.bits:.2f} | {after.bits:.2f} |"
        yield f"| parameters | {before.parameters:,} | {after.parameters:,} |"

    def _made(self) -> Iterator[str]:
        yield "## How it was made"
        yield ""
        if self.plan.format in NAMED:
            rates = "; ".join(self._rates()) or "all linears of the blocks alike"
            yield f"- Rates: {self.plan.bits} bits; {rates}."
        else:
            yield "- Rates: 4 bits, and a scale of 8 bits for each 16 weights; the config's `ignore` is kept."
        yield f"- Recipe: `{self.about['recipe']['name']}`."
        if (text := self.about.get("calibration")) is not None:
            yield f"- Calibration: {text['tokens']} tokens, {text['text']} (SHA-256 of the tokens `{text['sha256']}`)."
        else:
            yield "- Calibration: none; this format reads no text."
        yield "- Every lever, digests of the source, versions: `onegraph.json`. Digests of these files: `SHA256SUMS`."

    def _rates(self) -> Iterator[str]:
        kinds: dict[tuple[str, int], int] = {}
        for name, bits in self.config["layers"].items():
            key = NUMBER.sub("*", name), bits
            kinds[key] = kinds.get(key, 0) + 1
        for (name, bits), count in sorted(kinds.items()):
            yield f"`{name}` ({count} of them) " + ("kept" if bits == 16 else f"{bits}")
        for end in ("lm_head", "embed_tokens"):
            if self.config[end] is not None:
                yield f"`{end}` {self.config[end]}"

    def _use(self) -> Iterator[str]:
        own, coded = self.plan.own, self.plan.format in NAMED
        here = (
            ONEGRAPH if own else f"Its own decoder does not run this model ({self.plan.why}); `onegraph verify` does."
        )
        if not coded:
            served = "onegraph's plugin does not read NVFP4. vLLM reads ModelOpt's form itself; not tried on this file."
        elif not own:
            served = "Not this model: onegraph's own decoder does not run it."
        elif self.model_type == "gpt_oss":
            served = "Not this model: vLLM does not run gpt-oss in these formats, for the biases of its experts."
        else:
            served = VLLM
        yield "## How to run it"
        yield ""
        yield "onegraph is on no package index yet; in a checkout of it:"
        yield ""
        yield INSTALL
        yield ""
        yield "`MODEL` is this directory, or the name of this repository; `BASE` the unquantized model."
        yield f"\n**onegraph**\n\n{here}"
        yield f"\n**transformers**\n\n{TRANSFORMERS if coded else 'The integration of onegraph does not read NVFP4.'}"
        yield f"\n**vLLM**\n\n{served}"
