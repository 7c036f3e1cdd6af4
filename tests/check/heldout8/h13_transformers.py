"""Tiny random transformers models in decode loops."""
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NoRepeatNGramLogitsProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
    RepetitionPenaltyLogitsProcessor,
    StaticCache,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

SMALL = dict(vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)


def make(cls, cfg, seed):
    torch.manual_seed(seed)
    model = cls(cfg).to("cuda").eval()
    for p in model.parameters():
        p.requires_grad_(False)
        if p.dim() > 1:
            p.mul_(6.0)  # random initialisations are small: make attention matter
    return model


def toks(seed, *shape, low=3, high=48):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to("cuda")


# --------------------------------------------------------------------------- Llama, static cache
class StaticDecoder:
    def __init__(self, model, batch, max_len, prompt):
        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=max_len)
        self.positions = torch.arange(prompt.shape[1], device="cuda")
        with torch.no_grad():
            model(input_ids=prompt, position_ids=self.positions[None], past_key_values=self.cache, use_cache=True)
        self.position = self.positions[-1:].add(1)

    @torch.no_grad()
    def decode_one(self, input_ids):
        out = self.model(input_ids=input_ids, position_ids=self.position[None], past_key_values=self.cache, use_cache=True)
        self.position.add_(1)
        logits = out.logits[:, -1]
        return logits, logits.argmax(-1)


def factory_ok_llama_static_cache():  # hazard: 17
    model = make(LlamaForCausalLM, LlamaConfig(**SMALL), 1)
    dec = StaticDecoder(model, 2, 16, toks(10, 2, 4))
    return dec.decode_one, lambda i: (toks(100 + i, 2, 1),)


class IntPositionDecoder(StaticDecoder):
    """The position is the caller's Python integer, as in the old generate loops."""

    def __init__(self, *args):
        super().__init__(*args)
        self.past_length = self.positions.shape[0]

    def prepare_inputs(self, input_ids):
        pos = torch.arange(self.past_length, self.past_length + input_ids.shape[1], device=input_ids.device)  # expect: CG202 @llama_int_position
        return {"input_ids": input_ids, "position_ids": pos.unsqueeze(0)}

    @torch.no_grad()
    def decode_one(self, input_ids):
        out = self.model(**self.prepare_inputs(input_ids), past_key_values=self.cache, use_cache=True)
        self.past_length += input_ids.shape[1]
        return out.logits[:, -1]


def factory_bad_llama_int_position():  # hazard: 11
    model = make(LlamaForCausalLM, LlamaConfig(**SMALL), 2)
    dec = IntPositionDecoder(model, 2, 16, toks(11, 2, 4))
    return dec.decode_one, lambda i: (toks(110 + i, 2, 1),)


# --------------------------------------------------------------------------- Qwen3, dynamic cache
class Session:
    def __init__(self, model, prompt):
        self.model, self.cache = model, DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=prompt, past_key_values=self.cache)

    def __call__(self, input_ids):
        with torch.inference_mode():
            out = self.model(input_ids=input_ids, past_key_values=self.cache, use_cache=True)  # expect: CG208|CG205|CG202 @qwen3_dynamic_cache
        return out.logits


def factory_bad_qwen3_dynamic_cache():  # hazard: 17
    model = make(Qwen3ForCausalLM, Qwen3Config(head_dim=8, **SMALL), 3)
    return Session(model, toks(12, 2, 3)), lambda i: (toks(120 + i, 2, 1),)


# --------------------------------------------------------------------------- Llama, dynamic NTK
def factory_bad_llama_dynamic_ntk():  # hazard: 9
    cfg = LlamaConfig(**{**SMALL, "max_position_embeddings": 16}, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    model = make(LlamaForCausalLM, cfg, 4)

    @torch.no_grad()
    def step(input_ids, position_ids):
        out = model(input_ids=input_ids, position_ids=position_ids, use_cache=False)  # expect: CG101|CG108
        return out

    def inputs(i):
        return toks(130 + i, 1, 6), (torch.arange(6)[None] + 3 * i).to("cuda")

    return step, inputs


# --------------------------------------------------------------------------- GPT2, a whole ModelOutput
def factory_ok_gpt2_model_output():  # hazard: 2
    cfg = GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2)
    model = make(GPT2LMHeadModel, cfg, 5)
    pos = torch.arange(7, device="cuda")[None]

    def step(batch):
        with torch.inference_mode():
            return model(input_ids=batch["input_ids"], position_ids=pos, use_cache=False, output_hidden_states=True)

    return step, lambda i: ({"input_ids": toks(140 + i, 2, 7)},)


# --------------------------------------------------------------------------- Mixtral, eager experts
def factory_bad_mixtral_eager_experts():  # hazard: 5
    cfg = MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **SMALL)
    cfg._experts_implementation = "eager"
    model = make(MixtralForCausalLM, cfg, 6)
    pos = torch.arange(5, device="cuda")[None]

    @torch.no_grad()
    def step(input_ids):
        hidden = model.model(input_ids=input_ids, position_ids=pos, use_cache=False).last_hidden_state  # expect: CG104|CG101|CG108
        return model.lm_head(hidden[:, -1:])

    return step, lambda i: (toks(150 + i, 2, 5),)


# --------------------------------------------------------------------------- logits processors
def warped_sampling(processors, seed):
    model = make(GemmaForCausalLM, GemmaConfig(head_dim=8, **SMALL), seed)
    pos = torch.arange(8, device="cuda")[None]

    @torch.no_grad()
    def step(input_ids):
        logits = model(input_ids=input_ids, position_ids=pos, use_cache=False).logits[:, -1].float()
        scores = processors(input_ids, logits)
        return {"probs": scores.softmax(-1), "next": scores.argmax(-1)}

    return step, lambda i: (toks(160 + i, 2, 8, high=9),)


def factory_ok_gemma_no_repeat_ngram():  # hazard: 2
    return warped_sampling(LogitsProcessorList([TemperatureLogitsWarper(0.8), NoRepeatNGramLogitsProcessor(2)]), 7)


class BlockImmediateRepeat(LogitsProcessor):
    def __init__(self, penalty):
        self.penalty = penalty

    def __call__(self, input_ids, scores):
        last = input_ids[:, -1:]
        return scores.scatter(1, last, scores.gather(1, last) - self.penalty)


def scale_and_warp(processors, seed):
    model = make(GemmaForCausalLM, GemmaConfig(head_dim=8, **SMALL), seed)
    pos = torch.arange(8, device="cuda")[None]

    @torch.no_grad()
    def step(input_ids):
        logits = model(input_ids=input_ids, position_ids=pos, use_cache=False).logits[:, -1].float()
        scores = processors(input_ids, logits)
        return {"probs": scores.softmax(-1), "next": scores.argmax(-1)}

    return step, lambda i: (toks(170 + i, 2, 8, high=9),)


def factory_ok_gemma_warpers():  # hazard: 2
    procs = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.2), BlockImmediateRepeat(2.0), TemperatureLogitsWarper(0.7), TopKLogitsWarper(10)])
    return scale_and_warp(procs, 8)


# --------------------------------------------------------------------------- Bart, cross attention
def bart(seed):
    cfg = BartConfig(
        vocab_size=48, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )
    return make(BartForConditionalGeneration, cfg, seed)


class BartDecoder:
    """Teacher-forced scoring of a fixed window against a source that changes."""

    def __init__(self, model):
        self.model = model
        self.source_mask = torch.ones(2, 6, dtype=torch.long, device="cuda")

    @torch.no_grad()
    def score(self, source, target):
        enc = self.model.model.encoder(input_ids=source)
        out = self.model(encoder_outputs=enc, decoder_input_ids=target, use_cache=False)
        logp = out.logits.log_softmax(-1)
        return logp[:, :-1].gather(-1, target[:, 1:, None]).squeeze(-1).sum(-1), enc


def factory_ok_bart_scoring():  # hazard: 9
    dec = BartDecoder(bart(9))
    return dec.score, lambda i: (toks(180 + i, 2, 6), toks(190 + i, 2, 5))


class CrossCacheDecoder:
    """Cross-attention keys belong to a request; when the request changes, its flags say so."""

    def __init__(self, model, request_length):
        self.model, self.request_length, self.n = model, request_length, 0
        cfg = model.config
        self.make_cache = lambda: EncoderDecoderCache(StaticCache(config=cfg, max_cache_len=8), StaticCache(config=cfg, max_cache_len=6))
        self.cache = self.make_cache()

    def begin_step(self):
        if self.n % self.request_length == 0:  # expect: CG201 @bart_cross_cache_reset
            self.cache.reset()  # expect: CG201 @bart_cross_cache_reset optional
        self.n += 1

    @torch.no_grad()
    def step(self, token, encoder_hidden, position):
        self.begin_step()
        mask = (torch.arange(8, device=token.device) <= position).expand(2, 1, 1, 8)
        out = self.model.model.decoder(input_ids=token, attention_mask=mask, encoder_hidden_states=encoder_hidden, past_key_values=self.cache, use_cache=True)  # expect: CG201 @bart_cross_cache_reset optional
        return self.model.lm_head(out.last_hidden_state)


def factory_bad_bart_cross_cache_reset():  # hazard: 10
    dec = CrossCacheDecoder(bart(10), request_length=3)

    def inputs(i):
        enc = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(200 + i)).to("cuda")
        return toks(210 + i, 2, 1), enc, torch.full((1,), i % 3, device="cuda")

    return dec.step, inputs


# --------------------------------------------------------------------------- a grown attention mask
class MaskedLlama:
    def __init__(self, model, prompt_len, max_len, fixed):
        self.model, self.fixed = model, fixed
        self.cache = StaticCache(config=model.config, max_cache_len=max_len)
        self.mask = torch.zeros(2, max_len, dtype=torch.long, device="cuda")
        self.filled = torch.full((1,), prompt_len, device="cuda")
        prompt = toks(13, 2, prompt_len)
        self.mask[:, :prompt_len].fill_(1)
        self.mask[:1, :2].fill_(0)  # left padding of the first row
        self.short = self.mask[:, :prompt_len].clone()
        with torch.no_grad():
            model(input_ids=prompt, attention_mask=self.short, position_ids=torch.arange(prompt_len, device="cuda")[None], past_key_values=self.cache)

    def attention_mask(self):
        if self.fixed:
            self.mask.index_fill_(1, self.filled, 1)
            return self.mask[:, None, None].bool()
        self.short = torch.cat([self.short, self.short.new_ones(2, 1)], -1)  # expect: CG208|CG205 @llama_growing_mask
        return self.short

    @torch.no_grad()
    def __call__(self, input_ids):
        mask = self.attention_mask()
        out = self.model(input_ids=input_ids, attention_mask=mask, position_ids=self.filled[None], past_key_values=self.cache)  # expect: CG208 @llama_growing_mask optional
        self.filled.add_(1)
        return out.logits


def factory_bad_llama_growing_mask():  # hazard: 17
    return MaskedLlama(make(LlamaForCausalLM, LlamaConfig(**SMALL), 11), 4, 12, fixed=False), lambda i: (toks(220 + i, 2, 1),)


def factory_ok_llama_full_mask():  # hazard: 17
    return MaskedLlama(make(LlamaForCausalLM, LlamaConfig(**SMALL), 12), 4, 12, fixed=True), lambda i: (toks(230 + i, 2, 1),)
