"""Tasks, questions and conversations: what is read, what is refused and in which words."""

import gzip
import hashlib
import json
import subprocess
import sys
import tomllib
from collections import Counter
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast

from specbench import prompts
from specbench.errors import SpecbenchError
from specbench.prompts import Question, load_task

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"the shared data is not here ({SHARED})")

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}{% if think %} deep{% endif %}"
    "{% if forbid %}{{ raise_exception('no such roles') }}{% endif %}"
)
WORDS = ["<unk>", "<s>", "</s>", "user", "assistant", "hello", "world", "again", "yes", "deep"]


@pytest.fixture
def tokenizer():
    """Words are tokens; the tokenizer itself puts <s> before a text."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture
def chat(tokenizer):
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write(path, *rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8"
    )
    return str(path)


def refusal(ref, **options):
    with pytest.raises(SpecbenchError) as caught:
        load_task(ref, **options)
    assert "\n" not in caught.value.message + caught.value.hint
    return caught.value


def ask(*turns):
    return Question("1", "t", None, turns)


def words(ids):
    return " ".join(WORDS[i] for i in ids)


# Bundled tasks


@pytest.mark.parametrize("name", prompts.bundled_names())
def test_bundled_task_agrees_with_its_toml(name):
    meta = tomllib.loads((files("specbench.tasks") / f"{name}.toml").read_text("utf-8"))
    task = load_task(name)
    assert (task.name, task.source, task.template) == (name, f"bundled:{name}", None)
    assert (task.licence, task.max_new_tokens) == (meta["licence"], meta["max_new_tokens"])
    assert task.turns == meta["turns"]
    assert len(task.questions) >= 30
    assert all(question.usable and question.category for question in task.questions)


def test_bundled_lists_what_load_task_loads():
    infos = prompts.bundled()
    assert [info.name for info in infos] == prompts.bundled_names()
    for info in infos:
        task = load_task(info.name)
        assert (info.rows, info.categories) == (len(task.questions), task.categories)


def test_listing_tasks_imports_nothing_heavy():
    code = (
        "import sys; from specbench import prompts; prompts.bundled(); "
        "print([m for m in ('torch', 'transformers', 'datasets', 'numpy', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Published files


@shared
def test_spec_bench_is_read_as_it_is():
    file = SHARED / "spec_bench" / "question.jsonl"
    task = load_task(str(file))
    assert (task.name, len(task.questions), len(task.categories)) == ("spec_bench", 480, 13)
    assert Counter(len(q.turns) for q in task.questions) == {1: 400, 2: 80}
    assert task.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    rows = [json.loads(line) for line in file.read_text("utf-8").split("\n") if line]
    assert [(q.id, list(q.turns), q.reference) for q in task.questions] == [
        (str(row["question_id"]), row["turns"], row.get("reference")) for row in rows
    ]


@shared
def test_limit_takes_every_category_of_spec_bench():
    task = load_task(str(SHARED / "spec_bench" / "question.jsonl"), limit=13)
    assert len({q.category for q in task.questions}) == 13
    assert [q.id for q in task.questions[:3]] == ["81", "91", "101"]


@shared
def test_humaneval_is_read_as_it_is():
    task = load_task(str(SHARED / "HumanEval.jsonl.gz"))
    assert (task.name, len(task.questions), task.template) == ("humaneval", 164, "{prompt}")
    first = task.questions[0]
    assert first.id == "HumanEval/0"
    assert first.turns[0].startswith("from typing import List\n")
    assert first.turns[0].endswith('"""\n')


# Other rows


@pytest.mark.parametrize(
    ("row", "turns", "template"),
    [
        ({"turns": ["a", "b"], "text": "unused"}, ("a", "b"), None),
        ({"question": "a", "answer": "b"}, ("a",), "{question}"),
        ({"prompt": ["a", "b"]}, ("a", "b"), "{prompt}"),
        ({"instruction": "a", "input": "b", "output": "c"}, ("a\n\nb",), "{instruction}\n\n{input}"),
        ({"instruction": "a", "input": None, "output": "c"}, ("a",), "{instruction}\n\n{input}"),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "x"},
                    {"role": "user", "content": "b"},
                ]
            },
            ("a", "b"),
            "{messages}",
        ),
        ({"conversations": [{"from": "human", "value": "a"}]}, ("a",), "{conversations}"),
    ],
)
def test_row_layouts(tmp_path, row, turns, template):
    task = load_task(write(tmp_path / "My File.jsonl", row))
    assert (task.name, task.questions[0].turns, task.template) == ("my_file", turns, template)
    assert task.questions[0].id == "1"


def test_json_list_gz_and_line_ends(tmp_path):
    rows = [{"id": "a", "text": "one"}, {"id": "b", "text": "two\u2028more"}]
    (tmp_path / "x.json").write_text(json.dumps(rows, indent=1), "utf-8")
    lines = "\ufeff" + "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "y.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for name in ("x.json", "y.jsonl.gz"):
        task = load_task(str(tmp_path / name))
        assert [(q.id, *q.turns) for q in task.questions] == [("a", "one"), ("b", "two\u2028more")]


def test_a_blank_turn_loads(tmp_path):
    task = load_task(write(tmp_path / "x.jsonl", {"turns": [""]}, {"turns": ["a"]}))
    assert [q.usable for q in task.questions] == [False, True]


def test_two_tasks_of_one_name_are_refused(tmp_path):
    path = write(tmp_path / "x.jsonl", {"turns": ["a"]})
    with pytest.raises(SpecbenchError, match="two tasks are called 'x'"):
        prompts.load_tasks([path, path])


# Refusals

GOOD = {"question_id": 1, "turns": ["a"]}


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ('{"turns": ["a"', "not JSON"),
        ("[1]", "not a JSON object"),
        ("[" * 100_000, "not readable as JSON"),
        ({"question_id": 2}, "no 'turns'"),
        ({"turns": "a"}, "not a non-empty list of strings"),
        ({"turns": []}, "not a non-empty list of strings"),
        ({"turns": ["a", None]}, "not a non-empty list of strings"),
        ({"turns": ["a"], "question_id": 1}, "already used in line 1"),
        ({"turns": ["a"], "category": ["b"]}, "'category' is neither"),
        ({"turns": ["a"], "question_id": True}, "'question_id' is neither"),
        ('{"turns": ["\\ud800"]}', "not valid Unicode"),
        ({"turns": [{"role": "system", "content": "s"}]}, "system message"),
        ({"turns": [{"role": "assistant", "content": "s"}]}, "no message of a user"),
    ],
)
def test_malformed_row_is_named_by_line(tmp_path, row, what):
    path = write(tmp_path / "x.jsonl", GOOD, "", row)
    assert refusal(path).message.startswith(f"{path}, line 3: ")
    assert what in refusal(path).message


def test_files_that_cannot_be_used(tmp_path):
    packed = gzip.compress(json.dumps(GOOD).encode() * 50)
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[:-9])
    (tmp_path / "plain.jsonl.gz").write_bytes(b"{}")
    (tmp_path / "latin.jsonl").write_bytes(b'{"turns": ["a"]}\n{"turns": ["\xe9"]}\n')
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "object.json").write_text("{}")
    (tmp_path / "broken.json").write_text('[{"turns": ["a"]},\n{"turns": ]')
    (tmp_path / "table.csv").write_text("a,b")
    (tmp_path / "folder.jsonl").mkdir()
    write(tmp_path / "blank.jsonl", {"turns": [" "]}, {"turns": [""]})
    write(tmp_path / "two.jsonl", {"prompt": "a", "text": "b"})
    expected = {
        "cut.jsonl.gz": "damaged or truncated",
        "plain.jsonl.gz": "damaged or truncated",
        "latin.jsonl": "line 2: not UTF-8",
        "empty.jsonl": "has no rows",
        "empty.json": "has no rows",
        "object.json": "not a list of rows",
        "broken.json": "line 2: not JSON",
        "table.csv": "is not a task file",
        "folder.jsonl": "Is a directory",
        "blank.jsonl": "every prompt is empty",
        "two.jsonl": "line 1: several columns may hold the prompt (prompt, text)",
        "missing.jsonl": "there is no such file",
    }
    for name, what in expected.items():
        assert what in refusal(str(tmp_path / name)).message, name


def test_unknown_task_is_answered_with_near_names(monkeypatch):
    monkeypatch.setattr(prompts, "bundled_names", lambda: ["translation", "qa"])
    assert "did you mean translation?" in refusal("translatoin").hint
    assert "specbench ls tasks" in refusal("nothing-like-it").hint
    assert "did you mean hf:gsm8k?" in refusal("gsm8k").hint
    assert "did you mean hf:openai/gsm8k?" in refusal("openai/gsm8k").hint


def test_limit_must_leave_a_question(tmp_path):
    assert "--limit 0" in refusal(write(tmp_path / "x.jsonl", GOOD), limit=0).message


# Round-robin


def test_take_round_robin():
    letters = [Question(f"{c}{i}", "t", c, ("x",)) for i, c in enumerate("aabacb")]
    dealt = [q.id for q in prompts.take_round_robin(letters, 99)]
    assert dealt == ["a0", "b2", "c4", "a1", "b5", "a3"]
    for n in range(7):
        assert [q.id for q in prompts.take_round_robin(letters, n)] == dealt[:n]
    assert prompts.take_round_robin([], 3) == ()


# Rendering


def test_template_renders_straight_to_ids(chat):
    ids = prompts.render(ask("hello world"), 0, [], chat)
    assert words(ids) == "<s> user hello world assistant"  # one BOS, from the template


def test_history_and_template_args_reach_the_template(chat):
    args = prompts.parse_template_args(["think=true"])
    ids = prompts.render(ask("hello", "again"), 1, ["yes"], chat, args)
    assert words(ids) == "<s> user hello assistant yes user again assistant deep"


def test_without_a_template_the_text_is_plain(tokenizer):
    ids = prompts.render(ask("hello", "again"), 1, ["yes"], tokenizer)
    assert words(ids) == "<s> hello yes again"  # the tokenizer's own BOS


def test_notes_say_how_prompts_are_made(tokenizer):
    assert "no chat template" in prompts.template_note(tokenizer)
    assert "think has no effect" in prompts.template_note(tokenizer, {"think": True})
    assert "no tokenizer" in prompts.template_note(None)
    tokenizer.chat_template = TEMPLATE
    assert prompts.template_note(tokenizer, {"think": True}) is None
    assert "does not read thinking" in prompts.template_note(tokenizer, {"thinking": True, "think": False})


@pytest.mark.parametrize("answer", [[1, 5], [[1, 5]], {"input_ids": [1, 5]}, {"input_ids": [[1, 5]]}])
def test_whatever_a_tokenizer_returns_becomes_a_flat_list(answer):
    fake = SimpleNamespace(chat_template="x", apply_chat_template=lambda *_, **__: answer)
    assert prompts.render(ask("hello"), 0, [], fake) == [1, 5]


def test_a_template_that_refuses_is_one_clear_error(chat):
    with pytest.raises(SpecbenchError, match="refuses the conversation: no such roles"):
        prompts.render(ask("hello"), 0, [], chat, {"forbid": True})


def test_a_blank_turn_has_no_ids(chat):
    assert prompts.render(ask(" \n"), 0, [], chat) == []


def test_missing_history_is_a_bug(chat):
    with pytest.raises(AssertionError):
        prompts.render(ask("hello", "again"), 1, [], chat)


def test_template_args_are_typed():
    given = ["a=True", "b=False", "c=-3", "d=0.5", "e=1e3", "f=high", "g=", "h=x=y", "i=nan", "j=1_0"]
    assert prompts.parse_template_args(given) == {
        "a": True,
        "b": False,
        "c": -3,
        "d": 0.5,
        "e": 1000.0,
        "f": "high",
        "g": "",
        "h": "x=y",
        "i": "nan",
        "j": "1_0",
    }


@pytest.mark.parametrize("args", [["x"], ["=1"], ["a b=1"], ["tokenize=false"], ["x=1", "x=2"]])
def test_template_args_refused(args):
    with pytest.raises(SpecbenchError):
        prompts.parse_template_args(args)


# Random ids


def test_random_ids_depend_on_text_and_seed_only():
    ids = prompts.random_ids("some text", 200, 10, 7, avoid=[4, 9])
    assert set(ids) == {3, 5, 6, 7, 8}
    assert ids == prompts.random_ids("some text", 200, 10, 7, avoid=[4, 9])
    assert ids != prompts.random_ids("some text", 200, 10, 8, avoid=[4, 9])
    assert ids != prompts.random_ids("other text", 200, 10, 7, avoid=[4, 9])
    assert prompts.random_ids("fixed for good", 5, 32000, 0) == [20909, 16519, 29037, 20066, 8633]
    with pytest.raises(SpecbenchError):
        prompts.random_ids("x", 1, 5, avoid=range(5))


def test_no_tokenizer_renders_an_id_per_four_characters():
    ids = prompts.render(ask("a" * 401), 0, [], None, vocab_size=50, avoid={10})
    assert len(ids) == 101
    assert 10 not in ids
    assert prompts.render(ask("a" * 401), 0, [], None, vocab_size=50, seed=1, avoid={10}) != ids


# What the runner asks


def test_check_prompt():
    assert prompts.check_prompt([], 10, 100) == "empty prompt"
    assert prompts.check_prompt([1] * 90, 10, 100) is None
    assert "91 tokens + 10 new exceed the context of 100" in prompts.check_prompt([1] * 91, 10, 100)
    assert prompts.check_prompt([1] * 10**4, 10, None) is None


def test_stop_ids_are_a_union(tokenizer):
    config = GenerationConfig(eos_token_id=[7, 8])
    assert prompts.stop_ids(config, tokenizer) == {2, 7, 8}
    assert prompts.stop_ids(SimpleNamespace(generation_config=config), None) == {7, 8}
    assert prompts.stop_ids(GenerationConfig(eos_token_id=0), None) == {0}
    assert prompts.stop_ids(GenerationConfig(), tokenizer) == {2}
    assert prompts.stop_ids(None, None) == frozenset()
