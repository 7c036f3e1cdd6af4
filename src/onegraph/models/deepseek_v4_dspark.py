"""DSpark, the draft stages of DeepSeek-V4 0731 and 0813 (`mtp.0` to `mtp.2`): a block of tokens in one pass.

The decoder's streams behind some of its layers, averaged over the streams and joined, become one vector a token, and of
that each stage makes the keys of its window (`read`). A block is the token that is known and noise behind it; all of it
passes through the stages at once and sees the window and all of itself (`forward`). Then, one after the other, a
Markov head adds to the logits of each place what the token in front of it makes likely.

The windows lie in a cache of their own (`new_cache`) or in the decoder's (`DeepseekV4.new_cache(drafts=
draft.attentions, spare=k)`): token t stands for the decoder's token t, so `truncate` takes back both.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.dense import DENSE
from onegraph.models.deepseek_v4 import DeepseekBlock, DeepseekV4, Hyper, build_block, build_hyper
from onegraph.models.deepseek_v4_config import DeepseekV4Config, DSpark
from onegraph.models.deepseek_v4_mtp import Logits, MakeCache, draft_loader, shared_embedding, window_cache
from onegraph.nn.deepseek_attention import DeepseekAttention
from onegraph.nn.deepseek_cache import DeepseekCache
from onegraph.nn.embedding import Embedding
from onegraph.nn.linear import Linear, dense
from onegraph.ops.deepseek_hyper import hyper_sum
from onegraph.ops.norm import rms_norm

Draw = Callable[[Tensor, int], Tensor]


def _likeliest(logits: Tensor, i: int) -> Tensor:
    return logits.argmax(1)


class DSparkDraft(nn.Module):
    """The draft stages of a loaded decoder, on the device of its last stage. Build it with `load`.

    Attributes:
        config, dtype: the decoder's. layers: behind which the decoder's streams are tapped. block: tokens drafted.
    """

    main_norm: Tensor
    noise: Tensor

    def __init__(
        self,
        *,
        config: DeepseekV4Config,
        dspark: DSpark,
        embed: Embedding,
        logits: Logits,
        blocks: Sequence[DeepseekBlock],
        main: tuple[Linear, Tensor],
        head: Hyper,
        markov: tuple[Embedding, Linear],
        confidence: Linear,
        dtype: torch.dtype,
        make_cache: MakeCache,
    ) -> None:
        super().__init__()
        self._make_cache = make_cache
        self.config, self.dtype, self.layers, self.block = config, dtype, dspark.layers, dspark.block
        self.embed, self.blocks, self.head, self._logits = embed, nn.ModuleList(blocks), head, logits
        self.main_projection, (self.markov_in, self.markov_out), self.confidence = main[0], markov, confidence
        self.register_buffer("main_norm", main[1])
        noise = torch.full((1, dspark.block - 1), dspark.noise, device=main[1].device)
        self.register_buffer("noise", noise, persistent=False)
        self.eval()

    @classmethod
    def load(cls, checkpoint: Checkpoint, model: DeepseekV4) -> "DSparkDraft":
        """Reads the stages that belong to `model`, in the precision in which the checkpoint has them.

        Raises ValueError (CheckpointError among them) that names what is missing or wrong, and for a checkpoint whose
        draft is not DSpark's.
        """
        config = DeepseekV4Config.from_dict(checkpoint.config)
        if config.dspark is None:
            raise ValueError(f"{checkpoint.path}: config.json has no dspark_block_size; its draft layer is no DSpark")
        loader = draft_loader(checkpoint, config, model)
        device = model.devices[-1]
        tables = config.main.tables(config.rope_dim, model.max_context, device)
        stages = [config.layer(config.layers + i) for i in range(config.drafts)]
        first, last = stages[0].prefix, stages[-1].prefix
        with loader.reading():
            blocks = []
            for stage in stages:
                blocks.append(build_block(loader, config, stage, tables, device, model.peer))
                loader.forget()
            markov = [loader.tensor(f"{last}markov_head.markov_w{i}.weight", device) for i in (1, 2)]
            return cls(
                config=config,
                dspark=config.dspark,
                embed=shared_embedding(model),
                logits=model.logits,
                blocks=blocks,
                main=(loader.linear(f"{first}main_proj", device), loader.float32(f"{first}main_norm.weight", device)),
                head=build_hyper(loader, f"{last}hc_head_", f"{last}norm.weight", device),
                markov=(Embedding(DENSE, {"weight": markov[0]}, model.dtype), dense(markov[1])),
                confidence=dense(loader.float32(f"{last}confidence_head.proj.weight", device)),
                dtype=model.dtype,
                make_cache=partial(window_cache, model),
            )

    def new_cache(self, *, rows: int, pages: int, page_size: int, pages_per_row: int, spare: int) -> DeepseekCache:
        """Of these stages alone, of the decoder's slots, from which `spare` latest tokens may be taken back."""
        sizes = {"rows": rows, "pages": pages, "page_size": page_size, "pages_per_row": pages_per_row, "spare": spare}
        return self._make_cache(self.attentions, **sizes)

    @property
    def attentions(self) -> list[DeepseekAttention]:
        """The layers whose state a cache of the decoder must hold besides its own."""
        return [block.attention for block in self._blocks]

    @property
    def _blocks(self) -> list[DeepseekBlock]:
        return [block for block in self.blocks if isinstance(block, DeepseekBlock)]

    def taps(self) -> dict[int, Tensor | None]:
        """To give to `DeepseekV4.run`, which puts in what `read` takes."""
        return dict.fromkeys(self.layers)

    def read(self, taps: Mapping[int, Tensor | None], cache: DeepseekCache) -> None:
        """Writes keys for the decoder's tokens, at the cache's positions and counts. taps: [B, Q, D] by layer.

        Raises ValueError where the decoder has not run a layer that is tapped.
        """
        found = [tap.to(self.main_norm.device) for layer in self.layers if (tap := taps.get(layer)) is not None]
        if len(found) < len(self.layers):
            raise ValueError(f"taps are of {len(found)} layers; give those of {self.layers}, behind all stages")
        x = torch.cat(found, dim=2)
        x = rms_norm(self.main_projection(x), self.main_norm, self.config.eps)
        for attention in self.attentions:
            cache.remember(attention, attention.keys(x))

    def draft(self, known: Tensor, cache: DeepseekCache, draw: Draw) -> list[Tensor]:
        """The tokens int64 [B] of `forward`, one after the other."""
        return list(self(known, cache, draw)[0].unbind(1))

    def forward(self, known: Tensor, cache: DeepseekCache, draw: Draw = _likeliest) -> tuple[Tensor, Tensor, Tensor]:
        """Drafts behind a token; nothing is written.

        Args:
            known: int64 [B], the token at the cache's position, which no layer has read yet.
            draw: logits float32 [B, V] and the token's place in the block, 0 the first -> tokens int64 [B].

        Returns tokens int64 [B, block] that follow it, as they were drawn; their logits float32 [B, block, V]; and for
        each float32 [B, block] whose sigmoid says how likely the decoder agrees.
        """
        tokens = torch.cat((known.unsqueeze(1), self.noise.expand(known.shape[0], -1)), dim=1)
        streams = self.embed(tokens).unsqueeze(2).repeat(1, 1, self.config.streams, 1)
        update = None
        for block in self._blocks:
            update = block(streams, tokens, _BlockAttend(cache), update)
        assert update is not None, "there is at least one stage"
        block.write(streams, update)
        h, c = self.head, self.config
        x = hyper_sum(streams, h.fn, h.base, h.scale, c.eps, c.hyper_eps)
        logits = self._logits(rms_norm(x, h.norm, c.eps))
        found, seen, rows = [known], [], []
        for i in range(self.block):
            seen.append(self.markov_in(found[-1]))
            rows.append(logits[:, i] + self.markov_out(seen[-1], float32=True))
            found.append(draw(rows[-1], i))
        both = torch.cat((x.float(), torch.stack(seen, 1).float()), dim=2)
        return torch.stack(found[1:], 1), torch.stack(rows, 1), self.confidence(both).squeeze(2)


class _BlockAttend:
    """A cache as a block of drafts sees it."""

    def __init__(self, cache: DeepseekCache) -> None:
        self.attend = cache.attend_block
