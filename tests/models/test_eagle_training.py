"""Training an EAGLE head: what it learns from, where that is kept, and its loss."""

import math
from itertools import islice

import pytest
import torch
from torch.nn import functional

from eagle import net_of
from models import save_hf
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models import eagle_training
from onegraph.models.eagle import EagleConfig
from onegraph.models.eagle_net import EagleNet, head_config
from onegraph.models.eagle_start import start_copying
from onegraph.models.eagle_texts import Batch, Shelf, Texts, Written
from onegraph.models.eagle_training import Exam, Teacher, train
from onegraph.models.llama import Llama

LAYERS, STEPS = (0, 2), 3
VOCABULARY = torch.arange(0, 131, 2)
HOST = torch.device("cpu")
NEAR = {"atol": 1e-4, "rtol": 1e-4}


def written(*lengths: int) -> list[Written]:
    draw = torch.Generator().manual_seed(0)
    return [Written(torch.randint(131, (n,), generator=draw).tolist(), n // 3) for n in lengths]


TEXTS = written(20, 9, 31, 14, 26, 12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    path = tmp_path_factory.mktemp("eagle_training")
    save_hf("llama", path)
    with Checkpoint.open(path) as checkpoint:
        return Llama.load(checkpoint, max_context=256)


def teacher_of(model: Llama, seed: int = 0) -> Teacher:
    device = model.device
    return Teacher(model, net_of(model, LAYERS, VOCABULARY.to(device), seed), VOCABULARY.to(device), STEPS)


def trained(model: Llama, shelves: list[Shelf], seed: int = 0, steps: int = 6) -> dict[str, torch.Tensor]:
    teacher = teacher_of(model, seed)
    exam = Exam(teacher, Texts(model, TEXTS[:2], LAYERS), 4)
    train(teacher, Texts(model, TEXTS, LAYERS, shelves), exam, batch=4, rate=1e-3, steps=steps, seconds=60.0, seed=seed)
    return teacher.net.state_dict()


def test_a_batch_has_the_states_of_single_texts(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all texts come from one pass of the model, padded; what was kept from none."""
    alone = [Texts(model, [text], LAYERS).batch([0]) for text in TEXTS]
    passes, run = [], Llama.run
    monkeypatch.setattr(Llama, "run", lambda *args: passes.append(args[3].shape) or run(*args))
    texts = Texts(model, TEXTS, LAYERS, [Shelf(HOST, 1 << 30)])
    for expected in (1, 1):
        batch = texts.batch(range(6))
        assert len(passes) == expected
        for i, single in enumerate(alone):
            length = len(TEXTS[i].tokens)
            for side in ("tokens", "hidden", "final"):
                torch.testing.assert_close(getattr(batch, side)[i, :length], getattr(single, side)[0], **NEAR)
            assert not batch.hidden[i, length:].any()
    monkeypatch.setattr("onegraph.models.eagle_texts.AT_ONCE", 40)
    bounded = Texts(model, TEXTS, LAYERS).batch(range(6))
    assert all(math.prod(shape) <= 40 for shape in passes[1:])
    torch.testing.assert_close(bounded.hidden, batch.hidden, **NEAR)


def test_a_shelf_takes_what_it_has_room_for(model: Llama) -> None:
    """Then the next one does; what is kept nowhere is computed again."""
    nbytes = [4 * 72 * 3 * len(text.tokens) for text in TEXTS]
    shelves = [Shelf(HOST, nbytes[0] + 1), Shelf(HOST, sum(nbytes[1:5]))]
    texts = Texts(model, TEXTS, LAYERS, shelves)
    for i in range(6):
        texts.batch([i])
    assert [shelf.left for shelf in shelves] == [1, 0]


def test_a_head_does_not_depend_on_where_states_are_kept(model: Llama) -> None:
    """But for rounding: what is computed again may be computed beside other texts."""
    nowhere, here, partly = (trained(model, [Shelf(HOST, left)]) for left in (0, 1 << 30, 20000))
    for name, tensor in nowhere.items():
        torch.testing.assert_close(here[name], tensor, atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(partly[name], tensor, atol=2e-4, rtol=1e-3)


def test_the_same_seed_gives_the_same_head(model: Llama) -> None:
    """Initial weights, order of texts and sums: bit for bit."""
    first, same, other = (trained(model, [Shelf(HOST, 20000)], seed) for seed in (3, 3, 4))
    assert all(tensor.equal(same[name]) for name, tensor in first.items())
    assert not all(tensor.equal(other[name]) for name, tensor in first.items())


def plain(teacher: Teacher, batch: Batch) -> tuple[torch.Tensor, list[list[bool]], list[list[bool]]]:
    """The loss as it is written down, text by text and place by place; and of each step what was asked and right, a
    list over the places that a round may begin from."""
    losses, asked, right = [], [], []
    for i, text in enumerate(batch.texts):
        n = len(text.tokens)
        final = batch.final[i, :n]
        truth = (final @ teacher.rows.t()).softmax(-1)
        best = teacher.model.logits(final).argmax(-1)
        embedded = teacher.model.embed(functional.pad(batch.tokens[i, :n], (0, STEPS)))
        unrolled = teacher.net.unroll(embedded[None], batch.hidden[i : i + 1, :n], STEPS)
        places = range(max(text.prompt, STEPS), n - 1)
        for step, features in enumerate(unrolled):
            logits = teacher.net.lm_head(features[0])
            found = [logits[p - 1 - step] for p in places]
            for p, each in zip(places, found, strict=True):
                losses.append(
                    teacher.weights[step] * functional.kl_div(each.log_softmax(-1), truth[p], reduction="sum")
                )
            begun = {p - 1 - step: bool(VOCABULARY[found[j].argmax()] == best[p]) for j, p in enumerate(places)}
            if not step:
                asked.append([]), right.append([])
            asked[-1].append([t in begun for t in range(n)])
            right[-1].append([begun.get(t, False) for t in range(n)])
    told = len(losses) // STEPS
    return torch.stack(losses).sum() / told, asked, right


def test_the_loss_is_that_of_the_probabilities(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its gradient, a few places at a time, for the places whose next token the model wrote."""
    monkeypatch.setattr(eagle_training, "LOGITS", 7 * len(VOCABULARY))
    teacher = teacher_of(model)
    batch = Texts(model, TEXTS, LAYERS).batch(range(6))
    expected, asked, right = plain(teacher, batch)
    wanted = torch.autograd.grad(expected, list(teacher.net.parameters()))
    loss, told = teacher(batch)
    assert told == sum(len(text.tokens) - 1 - max(text.prompt, STEPS) for text in TEXTS)
    torch.testing.assert_close(loss, expected)
    (2 * loss).backward()
    for (name, parameter), gradient in zip(teacher.net.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient, msg=name)
    score = Exam(teacher, Texts(model, TEXTS, LAYERS), 4)()
    assert score.loss == pytest.approx(expected.item(), rel=1e-4)
    for step in range(STEPS):
        alive = [
            (r[step][t], a[step][t] and all(r[before][t] for before in range(step)))
            for a, r in zip(asked, right, strict=True)
            for t in range(len(a[0]))
        ]
        read = sum(live for _, live in alive)
        assert score.accepted[step] == pytest.approx(sum(hit and live for hit, live in alive) / max(1, read))


def test_each_epoch_has_every_text_once() -> None:
    """Those of like length beside each other."""
    lengths = [len(text.tokens) for text in TEXTS] * 5
    rows = eagle_training._rows(lengths, 8, torch.Generator().manual_seed(0))
    for _ in range(3):
        epoch = list(islice(rows, 4))
        assert sorted(i for some in epoch for i in some) == list(range(30))
        spread = [max(lengths[i] for i in some) - min(lengths[i] for i in some) for some in epoch]
        assert max(spread) < max(lengths) - min(lengths)


@pytest.mark.gpu
def test_on_a_gpu_no_step_waits_and_states_may_lie_anywhere(tmp_path) -> None:
    """What copies would wait for the device raises; the GPU's own memory, the host's and none give the same losses."""
    save_hf("llama", tmp_path)
    device = torch.device("cuda")
    with Checkpoint.open(tmp_path) as checkpoint:
        model = Llama.load(checkpoint, device, torch.bfloat16, max_context=256)
    losses = []
    for shelf in (Shelf(device, 1 << 30), Shelf(HOST, 1 << 30), Shelf(HOST, 0)):
        teacher, texts = teacher_of(model), Texts(model, TEXTS, LAYERS, [shelf])
        optimizer = torch.optim.AdamW(teacher.net.parameters(), fused=True)
        found = []
        for step in range(6):
            if step == 2:  # what is set up once, is
                torch.cuda.set_sync_debug_mode("error")
            try:
                batch = texts.batch([step % 3, 3, 4])
                with torch.autocast("cuda", torch.bfloat16):
                    loss, _ = teacher(batch)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(teacher.net.parameters(), 1.0)
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            found.append(loss.detach())
        losses.append(torch.stack(found).cpu())
    assert losses[0].isfinite().all()
    torch.testing.assert_close(losses[1], losses[0], atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(losses[2], losses[0], atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("width", [128, 64])
def test_a_head_begins_as_one_that_copies(model: Llama, width: int) -> None:
    """Before any training: of random tokens that come twice it knows those of the second time, where one of two hidden
    states tells what token it is of; also where the layer has more values than the model is wide."""
    config = head_config(model.config, LAYERS, 131, "tests/tiny")
    config["transformer_layer_config"] |= {"hidden_size": width, "head_dim": 64}
    torch.manual_seed(3)
    net, embedding = EagleNet(EagleConfig.from_dict(config), 2, 81), torch.randn(131, width)
    net.start_from(torch.ones(width), embedding)
    tokens = torch.stack([torch.randperm(131)[:40] for _ in range(24)]).repeat(1, 2)
    embedded = embedding[tokens]
    hidden = torch.cat((embedded + 0.5 * torch.randn(24, 80, width), 9 * torch.randn(24, 80, width)), dim=-1)

    @torch.no_grad()
    def known() -> float:
        """How often the token to come is among the first ten that the head names."""
        (features,) = net.unroll(functional.pad(embedded[16:], (0, 0, 0, 1)), hidden[16:], 1)
        first = net.lm_head(features).topk(10).indices[:, 40:78]
        return (first == tokens[16:, 42:, None]).any(dim=-1).float().mean().item()

    assert known() < 0.15
    start_copying(net, embedded[:16].flatten(0, 1), hidden[:16].flatten(0, 1), embedding, torch.ones(width))
    assert known() > 0.5
