"""Client libraries, each of which asks a server as people use it. One environment has all of them."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.clients.loads import Target, run

PRELUDE = """
import os, sys
from typing import Literal
import openai
from pydantic import BaseModel
url, model = sys.argv[1:]
base, ask, size = url + "/v1", [{"role": "user", "content": "Where is Emma?"}], 60
class Place(BaseModel):
    room: Literal["attic", "cellar"]
"""

LIBRARIES = {
    "anthropic": """
from anthropic import Anthropic
client = Anthropic(base_url=url, api_key="none")
assert client.messages.create(model=model, max_tokens=size, messages=ask).content
assert client.messages.count_tokens(model=model, messages=ask).input_tokens
with client.messages.stream(model=model, max_tokens=size, messages=ask) as stream:
    assert stream.get_final_message().content
""",
    "langchain-anthropic": """
from langchain_anthropic import ChatAnthropic
assert ChatAnthropic(model=model, base_url=url, api_key="none", max_tokens=size).invoke(ask).content
""",
    "litellm": """
import litellm
options = {"model": "openai/" + model, "api_base": base, "api_key": "none"}
options |= {"messages": ask, "max_tokens": size}
assert litellm.completion(**options).choices[0].message.content
assert any(chunk.choices[0].delta.content for chunk in litellm.completion(**options, stream=True))
""",
    "instructor": """
import instructor
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=base, api_key="none"), mode=mode)
    options = {"model": model, "response_model": Place, "messages": ask, "max_tokens": size}
    assert client.chat.completions.create(**options).room
""",
    "openai-agents": """
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner
for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    asked = kind(model, openai.AsyncOpenAI(base_url=base, api_key="none"))
    agent = Agent("a", model=asked, output_type=Place, model_settings=ModelSettings(max_tokens=size))
    assert Runner.run_sync(agent, "Where is Emma?").final_output.room
""",
    "pydantic-ai": """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
asked = OpenAIChatModel(model, provider=OpenAIProvider(base_url=base, api_key="none"))
assert Agent(asked, output_type=Place).run_sync("Where is Emma?").output.room
""",
    "smolagents": """
from smolagents import OpenAIServerModel
assert OpenAIServerModel(model, api_base=base, api_key="none", max_tokens=size).generate(ask).content
""",
    "llama-index": """
from llama_index.llms.openai_like import OpenAILike
asked = OpenAILike(model=model, api_base=base, api_key="none", is_chat_model=True, max_tokens=size)
assert asked.complete("Where is Emma?").text and [*asked.stream_complete("Where is Emma?")]
""",
    "dspy": """
import dspy
options = {"api_base": base, "api_key": "none", "max_tokens": size, "cache": False}
assert dspy.LM("openai/" + model, **options)("Where is Emma?")
""",
}
"""The calls of each library, behind the prelude."""


@dataclass(frozen=True, slots=True)
class Called:
    """The error of each library; empty where its calls succeeded."""

    errors: Mapping[str, str]

    def __str__(self) -> str:
        return f"{[*self.errors.values()].count('')} of {len(self.errors)} libraries"

    def problems(self) -> list[str]:
        return [f"{name}: {error}" for name, error in self.errors.items() if error]


def libraries(python: Path, target: Target, folder: Path) -> Called:
    quiet = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    errors: dict[str, str] = {}
    for name, calls in LIBRARIES.items():
        try:
            run([python, "-c", PRELUDE + calls, target.url, target.model], folder, **quiet)
            errors[name] = ""
        except subprocess.CalledProcessError as error:
            errors[name] = str(error.output)[-400:]
    return Called(errors)
