"""smolagents: an agent that calls tools; its code for what the model writes is its own."""

import json
import os
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

row = json.load(sys.stdin)


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


model = OpenAIServerModel(
    model_id="policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = ToolCallingAgent(tools=[add], model=model, max_steps=2, verbosity_level=0)
answer = agent.run(row["prompt"][-1]["content"])
with open(os.environ["HONE_REWARD"], "w") as file:
    json.dump({"reward": str(answer).count("e")}, file)
