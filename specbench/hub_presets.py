"""Datasets of the Hugging Face Hub whose prompts are known: `--task hf:NAME`."""

from __future__ import annotations

from dataclasses import dataclass

from specbench.questions import ALPACA_TEMPLATE, DEFAULT_MAX_NEW_TOKENS, Layout

ROW_IDS = ("question_id", "task_id")  # other ids may repeat in a dataset; a row's number is its id then


def in_column(name: str, category: str | None = None) -> Layout:
    """A dataset with its prompts in one column."""
    return Layout(name, category=category, ids=ROW_IDS)


def in_template(template: str) -> Layout:
    """A dataset whose prompts are put together from columns."""
    return Layout(template=template, category=None, ids=ROW_IDS)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A dataset and how to read it. `placeholder` starts the turns of rows that hold no prompt yet."""

    id: str
    description: str
    licence: str
    layout: Layout
    config: str | None = None
    split: str = "test"
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    aliases: tuple[str, ...] = ()
    placeholder: str | None = None


# Instructions come after the text: prompts that all begin alike would measure the prefix. HumanEval's stay
# raw, as they are from its file.
PRESETS: dict[str, Preset] = {
    "gsm8k": Preset(
        id="openai/gsm8k",
        description="Grade-school mathematics",
        licence="MIT",
        layout=in_column("question"),
        config="main",
        max_new_tokens=512,
    ),
    "humaneval": Preset(
        id="openai/openai_humaneval",
        description="Python functions to complete (raw prompts)",
        licence="MIT",
        layout=in_column("prompt"),
        max_new_tokens=512,
        aliases=("openai_humaneval",),
    ),
    "mbpp": Preset(
        id="google-research-datasets/mbpp",
        description="Short Python programs to write",
        licence="CC-BY-4.0",
        layout=in_template("{text}\n\nThe Python code must pass this test:\n{test_list[0]}"),
        config="full",
        max_new_tokens=512,
    ),
    "mt-bench": Preset(
        id="HuggingFaceH4/mt_bench_prompts",
        description="Two-turn conversations in 8 categories",
        licence="Apache-2.0",
        layout=in_column("prompt", "category"),
        split="train",
        max_new_tokens=512,
        aliases=("mt_bench", "mtbench", "mt_bench_prompts"),
    ),
    "alpaca": Preset(
        id="tatsu-lab/alpaca",
        description="Instructions, some with an input",
        licence="CC-BY-NC-4.0",
        layout=in_template(ALPACA_TEMPLATE),
        split="train",
    ),
    "cnn-dailymail": Preset(
        id="abisee/cnn_dailymail",
        description="News articles to summarise",
        licence="Apache-2.0",
        layout=in_template("{article}\n\nSummarize this article in three sentences."),
        config="3.0.0",
        aliases=("cnn_dailymail", "cnndm"),
    ),
    "wmt14": Preset(
        id="wmt/wmt14",
        description="German sentences to translate into English",
        licence="unknown (WMT: research use)",
        layout=in_template("{translation[de]}\n\nTranslate this German text into English."),
        config="de-en",
        aliases=("wmt14-de-en",),
    ),
    "natural-questions": Preset(
        id="google-research-datasets/nq_open",
        description="Short questions people asked a search engine",
        licence="CC-BY-SA-3.0",
        layout=in_column("question"),
        split="validation",
        aliases=("nq", "nq_open", "natural_questions"),
    ),
    "speed-bench": Preset(
        id="nvidia/SPEED-Bench",
        description="SPEED-Bench: prompts of 11 categories",
        licence="NVIDIA Evaluation Dataset License (fetched, not redistributable)",
        layout=in_column("turns", "category"),
        config="qualitative",
        max_new_tokens=512,
        aliases=("speed_bench", "speedbench"),
        placeholder="FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE",
    ),
}
