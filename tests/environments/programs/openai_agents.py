"""The openai-agents library, with a tool and two runs of one conversation."""

import json
import os
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

row = json.load(sys.stdin)
set_default_openai_api("chat_completions")
set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


agent = Agent(name="helper", instructions="Be brief.", tools=[add], model="policy")
first = Runner.run_sync(agent, row["prompt"][-1]["content"], max_turns=3)
second = Runner.run_sync(agent, [*first.to_input_list(), {"role": "user", "content": "Again."}], max_turns=3)
with open(os.environ["HONE_REWARD"], "w") as file:
    json.dump({"reward": f"{first.final_output}{second.final_output}".count("e")}, file)
