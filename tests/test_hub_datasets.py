"""`--task hf:…` against a stand-in for the `datasets` package."""

import sys
from types import ModuleType

import pytest

from specbench import hub_datasets
from specbench.errors import SpecbenchError
from specbench.hub_datasets import parse_ref
from specbench.hub_presets import PRESETS
from specbench.prompts import load_task

MARK = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
ROWS = {
    "openai/gsm8k": {"question": "How many?", "answer": "4"},
    "openai/openai_humaneval": {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": ""},
    "google-research-datasets/mbpp": {"task_id": 11, "text": "Write f.", "test_list": ["assert f()", "…"]},
    "HuggingFaceH4/mt_bench_prompts": {"category": "stem", "prompt": ["a", "b"], "prompt_id": 5},
    "tatsu-lab/alpaca": {"instruction": "Do", "input": "", "output": "", "text": "Below is…"},
    "abisee/cnn_dailymail": {"article": "News.", "highlights": "", "id": "x"},
    "wmt/wmt14": {"translation": {"de": "Hallo", "en": "Hello"}},
    "google-research-datasets/nq_open": {"question": "who", "answer": []},
    "nvidia/SPEED-Bench": {"question_id": "q", "category": "qa", "turns": ["a"]},
}


class FakeHub(ModuleType):
    """Records how it was called and how many rows were read."""

    def __init__(self):
        super().__init__("datasets")
        self.rows, self.calls, self.read, self.error = {}, [], 0, None

    def get_dataset_split_names(self, id, config=None, revision=None):
        return ["train", "extra", "validation"]

    def load_dataset(self, id, config=None, *, split, streaming, revision):
        self.calls.append((id, config, split, streaming, revision))
        if self.error:
            raise self.error
        return self._iterate(self.rows[id])

    def _iterate(self, rows):
        for row in rows:
            self.read += 1
            yield row


@pytest.fixture
def hub(monkeypatch):
    fake = FakeHub()
    fake.rows = {id: [row] for id, row in ROWS.items()}
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return fake


def refusal(ref, **options):
    with pytest.raises(SpecbenchError) as caught:
        load_task(ref, **options)
    assert "\n" not in caught.value.message + caught.value.hint
    return caught.value


@pytest.mark.parametrize("name", PRESETS)
def test_presets_by_every_name(hub, name):
    preset = PRESETS[name]
    tasks = [load_task(f"hf:{alias}") for alias in (name, preset.id, preset.id.lower(), *preset.aliases)]
    assert {task.name for task in tasks} == {name}
    assert {call[:3] for call in hub.calls} == {(preset.id, preset.config, preset.split)}
    assert len({task.sha256 for task in tasks}) == 1


@pytest.mark.parametrize(
    ("name", "turns", "id"),
    [
        ("gsm8k", ("How many?",), "1"),
        ("humaneval", ("def f():\n",), "HumanEval/0"),
        ("mbpp", ("Write f.\n\nThe Python code must pass this test:\nassert f()",), "11"),
        ("mt-bench", ("a", "b"), "1"),
        ("alpaca", ("Do",), "1"),
        ("cnn-dailymail", ("News.\n\nSummarize this article in three sentences.",), "1"),
        ("wmt14", ("Hallo\n\nTranslate this German text into English.",), "1"),
        ("speed-bench", ("a",), "q"),
    ],
)
def test_preset_prompts(hub, name, turns, id):
    task = load_task(f"hf:{name}")
    assert [(q.turns, q.id) for q in task.questions] == [(turns, id)]
    assert task.template == PRESETS[name].layout.spelled


def test_a_limit_streams_and_reads_no_more(hub):
    hub.rows["openai/gsm8k"] = [{"question": f"q{i}"} for i in range(100)]
    assert len(load_task("hf:gsm8k", limit=3).questions) == 3
    assert (hub.calls[-1][3], hub.read) == (True, 3)
    load_task("hf:gsm8k")
    assert hub.calls[-1][3] is False


def test_categories_need_the_whole_split(hub):
    hub.rows["HuggingFaceH4/mt_bench_prompts"] = [{"category": c, "prompt": [c]} for c in "aaab"]
    task = load_task("hf:mt-bench", limit=2)
    assert [q.category for q in task.questions] == ["a", "b"]
    assert hub.calls[-1][3] is False


def test_offline_the_cache_is_not_streamed(hub):
    hub.config = ModuleType("config")
    hub.config.HF_HUB_OFFLINE = True
    load_task("hf:gsm8k", limit=1)
    assert hub.calls[-1][3] is False


def test_any_dataset_with_a_column(hub):
    hub.rows["some/Thing"] = [{"ask": "a", "kind": 3, "id": 1}, {"ask": "b", "kind": 4, "id": 1}]
    task = load_task("hf:some/Thing:column=ask,category=kind,revision=abc")
    assert hub.calls[-1] == ("some/Thing", None, "validation", False, "abc")
    assert (task.name, task.template, task.categories) == ("thing", "{ask}", ("3", "4"))
    assert [q.id for q in task.questions] == ["1", "2"]
    assert task.source == "hf:some/Thing:category=kind,column=ask,revision=abc"


def test_references():
    assert parse_ref("hf:a/b:c:d:column=e") == parse_ref("hf:a/b:c:d,column=e")
    assert parse_ref("hf:a/b:c:d:column=e") == parse_ref("hf:a/b:column=e,config=c,split=d")
    assert parse_ref(parse_ref("hf:a/b::d,column=e").spelled) == parse_ref("hf:a/b::d,column=e")
    ref = parse_ref("hf:a/b::d")
    assert (ref.id, ref.config, ref.split, ref.spelled) == ("a/b", None, "d", "hf:a/b::d")
    for wrong in ("hf:", "hf:a:b:c:d", "hf:a:colour=x", "hf:a:column=", "hf:a:column=x,column=y"):
        with pytest.raises(SpecbenchError):
            parse_ref(wrong)


def test_another_config_is_another_task(hub):
    assert load_task("hf:gsm8k:socratic:train").name == "gsm8k-socratic"
    assert hub.calls[-1][:3] == ("openai/gsm8k", "socratic", "train")


def test_what_is_wrong_with_a_reference(hub):
    assert "names no prompt column" in refusal("hf:some/Thing").message
    assert "did you mean hf:gsm8k?" in refusal("hf:gsmk8").hint
    unknown = refusal("hf:gsm8k:column=quesiton")
    assert "no column 'quesiton'" in unknown.message
    assert "question, answer" in unknown.hint
    assert "no column 'kind'" in refusal("hf:gsm8k:category=kind").message
    hub.rows["wmt/wmt14"] = [{"translation": {"fr": "Bonjour"}}]
    assert "row 1: the template" in refusal("hf:wmt14:fr-en").message
    hub.rows["openai/gsm8k"] = []
    assert "has no rows" in refusal("hf:gsm8k").message


class DatasetNotFoundError(FileNotFoundError):
    pass


class ConnectTimeout(Exception):  # httpx's: no OSError
    pass


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (DatasetNotFoundError("Dataset 'x' doesn't exist on the Hub"), "doesn't exist"),
        (DatasetNotFoundError("Dataset 'x' is a gated dataset on the Hub.\nAsk."), "is gated"),
        (ConnectionError("offline"), "cannot be reached"),
        (ConnectTimeout(""), "cannot be reached"),
        (RuntimeError("Dataset scripts are no longer supported, but found x.py"), "no longer supported"),
        (ValueError("Config name is missing.\nPlease pick one among: ['a', 'b']"), "among: ['a', 'b']"),
    ],
)
def test_hub_errors_are_one_line(hub, error, what):
    hub.error = error
    assert what in refusal("hf:gsm8k").message


def test_speed_bench_placeholders_are_left_out_and_counted(hub):
    empty = {"question_id": "r", "category": "rag", "turns": [f"{MARK}\n\n{{question}}"]}
    hub.rows["nvidia/SPEED-Bench"].append(empty)
    task = load_task("hf:speed-bench")
    assert [q.id for q in task.questions] == ["q"]
    assert "1 of 2 rows" in task.notes[0]
    hub.rows["nvidia/SPEED-Bench"] = [empty]
    assert "prepare_data.py" in refusal("hf:speed-bench").hint


def test_datasets_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'specbench-llm[datasets]'" in refusal("hf:gsm8k").hint
    monkeypatch.setitem(sys.modules, "datasets", ModuleType("datasets"))  # a folder of that name
    assert "pip install 'specbench-llm[datasets]'" in refusal("hf:gsm8k").hint


def test_the_digest_follows_the_questions(hub):
    first = load_task("hf:gsm8k")
    hub.rows["openai/gsm8k"] = [{"question": "Another?"}]
    assert first.sha256 != load_task("hf:gsm8k").sha256
    assert hub_datasets.SYNTAX in refusal("hf:x/y").hint
