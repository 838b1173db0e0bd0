"""Self-speculation drafts what the shortened model would say, in the target's own cache, and learns which layers."""

from __future__ import annotations

import copy
import importlib

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_loop import ARCHITECTURES, generate
from transformers import DynamicCache

from specbench.decoding.draft import Drafter
from specbench.decoding.layer_search import ENOUGH, SEEN, TRIES, LayerSearch, agreement
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.errors import SpecbenchError
from specbench.models.target import Target
from specbench.spec import convert_options, parse_spec

SelfSpeculation = importlib.import_module("specbench.methods.self_speculation").SelfSpeculation
NEW, VOCAB = 24, 64


@pytest.fixture(scope="module")
def llama() -> Target:
    return tiny.llama(VOCAB, layers=4)


def idle(*which: int, layers: int = 8) -> Target:
    """A target some of whose layers do nothing."""
    target = tiny.llama(VOCAB, layers=layers)
    with torch.no_grad():
        for layer in which:
            target.model.model.layers[layer].self_attn.o_proj.weight.zero_()
            target.model.model.layers[layer].mlp.down_proj.weight.zero_()
    return target


IDLE = idle(1, layers=4)


class Watched(SelfSpeculation):
    """Takes down the text before each draft, and the draft, of row 0; and the drafts of all rows."""

    def begin(self, prompts: list[list[int]]) -> None:
        super().begin(prompts)
        self.seen: list[tuple[list[int], list[int]]] = []
        self.drafts: list[list[list[int]]] = []

    def propose(self, budgets: list[int], generators: object) -> list:
        drafts = super().propose(budgets, generators)
        self.drafts.append([[int(token) for token in draft.tokens] for draft in drafts])
        self.seen.append((list(self._texts[0]), self.drafts[-1][0]))
        return drafts


def chain(target: Target, text: list[int], skip: set[int], count: int) -> list[int]:
    """The same by transformers: the whole model over the text's cache, the shortened one from the last token."""
    cache = DynamicCache(config=target.config)
    decoder = target.model.get_decoder()
    whole, tokens = decoder.layers, [text[-1]]
    with target.stock_attention(), torch.no_grad():
        argument = {target._cache_argument: cache}
        target.model(torch.tensor([text[:-1]]), **argument)
        decoder.layers = torch.nn.ModuleList(layer for i, layer in enumerate(whole) if i not in skip)
        try:
            for step in range(count):
                position = torch.tensor([[len(text) - 1 + step]])
                # A mask of the right length: the cache's own length is that of layer 0, which may be skipped.
                mask = torch.zeros(1, 1, 1, len(text) + step)
                out = target.model(
                    torch.tensor([tokens[-1:]]), position_ids=position, attention_mask=mask, **argument
                )
                tokens.append(int(out.logits[0, -1].argmax()))
        finally:
            decoder.layers = whole
    return tokens[1:]


@pytest.mark.parametrize(
    "options", [{"skip": [2]}, {"skip": [1, 3]}, {"skip": [0]}, {"exit": 2}, {}], ids=str
)
def test_drafts_are_those_of_the_shortened_model(llama: Target, options: dict) -> None:
    (prompt,) = tiny.prompts(1, VOCAB, seed=1)
    drafter = Watched(llama, k=3, **options)
    generate(DraftVerify(llama, drafter), Request([prompt], NEW))
    assert len({tuple(draft) for _, draft in drafter.seen}) > 3
    for text, draft in drafter.seen:
        assert draft == chain(llama, text, set(drafter.layers), len(draft))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_early_exit_is_the_model_cut_short(name: str) -> None:
    """On every architecture, with its own masks a layer: the cut model's own greedy answer."""
    config, attention = ARCHITECTURES[name]
    depth = config.num_hidden_layers
    target = tiny.build(config, seed=1, attn=attention)
    short = copy.deepcopy(target.model)
    short.get_decoder().layers = short.get_decoder().layers[: depth - 1]
    short.config.num_hidden_layers = depth - 1
    (prompt,) = tiny.prompts(1, VOCAB, seed=2)
    drafter = Watched(target, exit=depth - 1, k=4)
    generate(DraftVerify(target, drafter), Request([prompt], NEW))
    cut = Target(short)
    for text, draft in drafter.seen:
        outputs, _ = generate(DraftVerify(cut, Drafter(cut)), Request([text], len(draft) or 1))
        assert draft == outputs[0][: len(draft)]


@pytest.mark.parametrize("options", [{"skip": [1]}, {"search": True}], ids=str)
def test_nothing_is_held_beside_the_target(llama: Target, options: dict) -> None:
    prompts = tiny.prompts(2, VOCAB, seed=3)
    plain = DraftVerify(llama, Drafter(llama))
    answers, _ = generate(plain, Request(prompts, NEW))
    buffers = [[b.clone() for b in bs] for bs in (llama.cache._keys.layers, llama.cache._values.layers)]
    llama.cache.release()
    drafter = SelfSpeculation(llama, k=4, **options)
    method = DraftVerify(llama, drafter)
    assert generate(method, Request(prompts, NEW))[0] == answers
    assert drafter.weights_bytes() == drafter.kv_bytes() == 0
    assert drafter.draft_identity() is None
    for before, after in zip(buffers, (llama.cache._keys.layers, llama.cache._values.layers), strict=True):
        for old, new in zip(before, after, strict=True):
            for row, prompt in enumerate(prompts):
                last = len(prompt) + NEW - 1  # the answer's last token is never passed through
                torch.testing.assert_close(new[row, :, 1:last], old[row, :, 1:last], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [{"k": 1}, {"k": 6}, {"k": 2, "search": True}, {"k": "auto"}], ids=str)
def test_the_spare_slots_asked_for_are_enough(llama: Target, options: dict) -> None:
    """With a cache that has no slot to spare after rounding: writing behind its end would be an error."""
    llama.cache.release()
    drafter, new = SelfSpeculation(llama, **options), SEEN + 4
    prompt = [1] * (128 - 2 - drafter.max_nodes - new)
    generate(DraftVerify(llama, drafter), Request([prompt], new))
    assert llama.cache.slots == 128


def test_layers_are_as_before_after_a_fault(llama: Target) -> None:
    whole = llama.model.get_decoder().layers
    with pytest.raises(IndexError), llama.skipping({1}):
        llama.prefill([[VOCAB]])
    assert llama.model.get_decoder().layers is whole
    with pytest.raises(SpecbenchError, match="layers 4 do not exist"), llama.skipping({4}):
        pass


def test_a_doubtful_token_ends_the_draft(llama: Target) -> None:
    prompts = tiny.prompts(3, VOCAB, seed=4)
    lengths = {}
    for threshold in (0.0, 0.1, 1.0):
        method = DraftVerify(llama, SelfSpeculation(llama, skip=[2], k=4, threshold=threshold))
        _, rounds = generate(method, Request(prompts, NEW))
        # Near its end a row may draft no more than it may still emit.
        lengths[threshold] = [n for one in rounds[1:4] for n in one.drafted if n]
    assert set(lengths[0.0]) == {4}
    assert set(lengths[1.0]) == {1}
    assert set(lengths[0.1]) == {1, 4}, "each ends where its own token is in doubt"


def test_defaults_and_refusals(llama: Target) -> None:
    deep = tiny.llama(layers=12)
    assert SelfSpeculation(deep).layers == {4, 6}
    assert SelfSpeculation(llama).layers == {1}
    assert SelfSpeculation(tiny.llama(layers=2)).layers == {0}
    assert SelfSpeculation(llama, exit=1).layers == {1, 2, 3}
    parsed = convert_options(SelfSpeculation, parse_spec("self-speculation:skip=3+5+7,k=auto"))
    assert parsed == {"skip": [3, 5, 7], "k": "auto"}
    for options, words in [
        ({"skip": [1], "exit": 2}, "exclude each other"),
        ({"exit": 2, "search": True}, "exclude each other"),
        ({"skip": [4]}, "from 0 to 3"),
        ({"skip": [1, 1]}, "different layers"),
        ({"skip": [0, 1, 2, 3]}, "not all"),
        ({"exit": 0}, "between 1 and 3"),
        ({"exit": 4}, "between 1 and 3"),
        ({"search": True, "ratio": 1.0}, "ratio"),
        ({"warm": True}, "needs search"),
        ({"ratio": 0.9}, "ratio needs search=true"),
        ({"skip": [1], "ratio": 0.45}, "ratio needs search=true"),
        ({"k": 0}, "k must be"),
        ({"threshold": 1.5}, "threshold"),
    ]:
        with pytest.raises(ValueError, match=words):
            SelfSpeculation(llama, **options)
    with pytest.raises(ValueError, match="one layer only"):
        SelfSpeculation(tiny.llama(layers=1))


prompts_of = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)
few = settings(max_examples=6, deadline=None, derandomize=True)


@pytest.mark.parametrize("options", [{"k": 3, "threshold": 0.1}, {"exit": 2, "k": "auto"}], ids=str)
@few
@given(st.lists(prompts_of, min_size=3, max_size=3))
def test_rows_are_independent(llama: Target, options: dict, prompts: list[list[int]]) -> None:
    together, alone = Watched(llama, **options), Watched(llama, **options)
    generate(DraftVerify(llama, together), Request(prompts, NEW))
    for row, prompt in enumerate(prompts):
        generate(DraftVerify(llama, alone), Request([prompt], NEW))
        own = [drafts[0] for drafts in alone.drafts]
        others_go_on = len(together.drafts) - len(own)
        assert [drafts[row] for drafts in together.drafts] == own + [[]] * others_go_on


@pytest.mark.parametrize("options", [{"k": "auto"}, {"search": True, "ratio": 1 / 4, "k": "auto"}], ids=str)
@few
@given(st.lists(prompts_of, min_size=2, max_size=2), prompts_of)
def test_cold_drafts_do_not_depend_on_earlier_questions(
    options: dict, earlier: list[list[int]], prompt: list[int]
) -> None:
    drafter, fresh = Watched(IDLE, **options), Watched(IDLE, **options)
    generate(DraftVerify(IDLE, drafter), Request(earlier, NEW + SEEN))
    for asked in (drafter, fresh):
        generate(DraftVerify(IDLE, asked), Request([prompt], NEW + SEEN))
    assert not drafter.warm
    assert drafter.drafts == fresh.drafts
    assert drafter.layers == fresh.layers


# -- the search ----------------------------------------------------------------------------------------------------


def test_agreement_is_the_shortened_models_probability_of_the_answer(llama: Target) -> None:
    prompts = tiny.prompts(3, VOCAB, seed=5)
    outputs, _ = generate(DraftVerify(llama, Drafter(llama)), Request(prompts, SEEN + 3))
    texts = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    texts[1] = texts[1][:-2]  # a row with just enough, and one that does not count
    texts[2] = texts[2][: len(prompts[2]) + 5]
    llama.reserve(3, 200)
    llama.prefill([text[:-1] for text in texts])
    found = agreement(llama, frozenset({2}), texts, [len(p) for p in prompts], [True, True, False])
    expected = []
    for text, prompt in list(zip(texts, prompts, strict=True))[:2]:
        for step in range(SEEN):
            end = len(prompt) + step
            llama.reserve(1, 200)
            llama.prefill([text[:end]])
            at = torch.tensor([[end]])
            mask = torch.zeros(1, 1, 1, end + 2)
            mask[..., 0] = torch.finfo(torch.float32).min
            with llama.skipping({2}):
                logits = llama.forward(torch.tensor([[text[end]]]), at, at + 1, {llama.kinds[0]: mask}).logits
            expected.append(float(logits[0, 0].softmax(-1)[text[end + 1]]))
    assert found == pytest.approx(sum(expected) / len(expected), rel=1e-4)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_layer_that_does_nothing_is_found(rows: int) -> None:
    target = idle(6)
    prompts = tiny.prompts(rows, VOCAB, seed=6)
    drafter = SelfSpeculation(target, search=True, ratio=1 / 8, k=3)
    assert drafter.layers == {4}
    _, rounds = generate(DraftVerify(target, drafter), Request(prompts, 150))
    assert drafter.layers == {6}
    late = rounds[-8:-2]
    assert all(a == d for one in late for a, d in zip(one.accepted, one.drafted, strict=True) if d)


def test_the_search_is_bounded_and_starts_anew_unless_warm() -> None:
    target, (prompt,) = idle(6), tiny.prompts(1, VOCAB, seed=6)
    for warm in (False, True):
        drafter = SelfSpeculation(target, search=True, ratio=1 / 8, k=3, warm=warm)
        method = DraftVerify(target, drafter)
        assert method.warm == warm
        generate(method, Request([prompt], 150))
        assert drafter.layers == {6}
        assert drafter.search._tries <= TRIES
        generate(method, Request([prompt], 2))
        assert drafter.layers == ({6} if warm else {4})
        method.forget()
        assert drafter.layers == {4}


def test_short_answers_are_not_searched() -> None:
    target, prompts = idle(6), tiny.prompts(2, VOCAB, seed=6)
    drafter = SelfSpeculation(target, search=True, ratio=1 / 8, k=3)
    generate(DraftVerify(target, drafter), Request(prompts, SEEN + 1))
    assert drafter.search._tries == 0
    assert drafter.layers == {4}


def test_the_search_keeps_what_is_better() -> None:
    search = LayerSearch(10, 0.4)
    assert search.candidate() == search.best == {2, 4, 6, 8}
    search.judge(search.best, 0.5)
    seen = []
    while not search.done:
        candidate = search.candidate()
        assert len(candidate) == 4
        assert candidate <= set(range(1, 9)), "the first and the last layer stay"
        assert len(candidate & search.best) == 3, "a neighbour of the best"
        seen.append(candidate)
        search.judge(candidate, 0.6 if len(seen) == 3 else 0.4)
    assert len(seen) == TRIES - 1
    assert search.best == seen[2]
    search.begin(keep=True)
    assert search.best == seen[2] == search.candidate()
    search.judge(search.best, ENOUGH)
    assert search.done
    assert LayerSearch(2, 0.9).best == {1}, "of few layers the first stays"
