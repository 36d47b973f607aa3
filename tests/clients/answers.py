"""lm-eval asks keeper's held-out questions over HTTP; the model itself gives the expected answers."""

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from tools.keeper.evaluate import exact_matches, load, prompt, token_ids
from tools.keeper.questions import Question, questions

from tests.clients.loads import OFFLINE, Target, run, words_of

COUNT = 24
CONTEXT_TOKENS = 256
SEED = 8
CHOICES = 4
LOGLIKELIHOOD_ERROR_MAX = 1e-3

TASKS = {
    "keeper_answers": {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["<|end|>", "\n"], "max_gen_toks": 24, "do_sample": False},
        "filter_list": [
            {"name": "stripped", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}
        ],
        "metric_list": [{"metric": "exact_match"}],
    },
    "keeper_choices": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "target_delimiter": " ",
        "metric_list": [{"metric": "acc"}],
    },
}


@dataclass(frozen=True, slots=True)
class Compared:
    """lm-eval over HTTP beside the model by itself."""

    answers: float
    answers_directly: float
    choices: float
    choices_directly: float
    loglikelihood_error: float  # the largest

    def problems(self) -> list[str]:
        return [
            text
            for text, holds in {
                f"{self.answers} of the answers are right, {self.answers_directly} directly": self.answers
                == self.answers_directly,
                f"{self.choices} of the choices are right, {self.choices_directly} directly": self.choices
                == self.choices_directly,
                f"a loglikelihood is off by {self.loglikelihood_error}": self.loglikelihood_error
                < LOGLIKELIHOOD_ERROR_MAX,
            }.items()
            if not holds
        ]


def lm_eval(python: Path, target: Target, folder: Path) -> Compared:
    """`lm_eval --model local-completions`, with tasks of our own, as text and as tokens."""
    asked = questions(COUNT, CONTEXT_TOKENS, seed=SEED)
    model, tokenizer = load(target.tokenizer)
    rows = _rows(asked, tokenizer)
    _write_tasks(rows, folder)
    for name, tokenized in (("keeper_answers", False), ("keeper_choices", True)):
        arguments = {
            "model": target.model,
            "base_url": f"{target.url}/v1/completions",
            "tokenizer_backend": "huggingface",
            "tokenizer": target.tokenizer,
            "num_concurrent": 2,
            "tokenized_requests": tokenized,
        }
        options = {
            "--model": "local-completions",
            "--model_args": ",".join(f"{option}={value}" for option, value in arguments.items()),
            "--tasks": name,
            "--include_path": folder,
            "--output_path": folder / name,
        }
        run([python.with_name("lm_eval"), *words_of(options), "--log_samples"], folder, **OFFLINE)
    matches = exact_matches(model, tokenizer, asked)["intact"]
    scored = {row["doc"]["prompt"]: row for row in _samples(folder, "keeper_choices")}
    errors: list[float] = []
    right = 0
    for row in rows:
        expected = [
            _loglikelihood(model, tokenizer, row["prompt"], f" {choice}") for choice in row["choices"]
        ]
        got = [float(sample[0][0]) for sample in scored[row["prompt"]]["resps"]]
        errors += [abs(a - b) for a, b in zip(expected, got, strict=True)]
        right += expected.index(max(expected)) == row["gold"]
    return Compared(
        answers=_result(folder, "keeper_answers", "exact_match,stripped"),
        answers_directly=sum(matches) / len(matches),
        choices=_result(folder, "keeper_choices", "acc,none"),
        choices_directly=right / len(rows),
        loglikelihood_error=max(errors),
    )


def _rows(asked: list[Question], tokenizer: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - as transformers
    """The wrong choices are right answers of other questions."""
    rng = Random(SEED)
    rows: list[dict[str, Any]] = []
    for question in asked:
        others = sorted({other.answer for other in asked} - {question.answer})
        choices = [question.answer, *rng.sample(others, CHOICES - 1)]
        rng.shuffle(choices)
        rows.append(
            {
                "prompt": prompt(tokenizer, question.messages),
                "answer": question.answer,
                "choices": choices,
                "gold": choices.index(question.answer),
            }
        )
    return rows


def _write_tasks(rows: list[dict[str, Any]], folder: Path) -> None:
    """Tasks as lm-eval reads them: JSON is YAML."""
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        common = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "doc_to_text": "{{prompt}}",
        }
        (folder / f"{name}.yaml").write_text(json.dumps({**common, **task}))


@torch.no_grad()
def _loglikelihood(model: Any, tokenizer: Any, before: str, text: str) -> float:  # noqa: ANN401 - the same
    context = token_ids(tokenizer, before)
    tokens = token_ids(tokenizer, before + text)
    assert tokens[: len(context)] == context
    logprobs_TV = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    return sum(float(logprobs_TV[at - 1, tokens[at]]) for at in range(len(context), len(tokens)))


def _samples(folder: Path, name: str) -> list[dict[str, Any]]:
    (path,) = (folder / name).rglob(f"samples_{name}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def _result(folder: Path, name: str, metric: str) -> float:
    (path,) = (folder / name).rglob("results_*.json")
    return json.loads(path.read_text())["results"][name][metric]
