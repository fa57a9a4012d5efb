"""mini-swe-agent: runs what the model writes as commands of a shell, so it belongs inside bubblewrap."""

import json
import os
import sys

os.environ["MSWEA_SILENT_STARTUP"] = "1"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no download
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

row = json.load(sys.stdin)
model = LitellmTextbasedModel(model_name="openai/policy", cost_tracking="ignore_errors")
agent = DefaultAgent(
    model,
    LocalEnvironment(cwd=os.getcwd()),
    system_template="Write one ```mswea_bash_command block.",
    instance_template="{{task}}",
    step_limit=3,
    cost_limit=0,
)
agent.run(row["prompt"][-1]["content"])
said = "".join(str(m.get("content")) for m in agent.messages if m["role"] == "assistant")
with open(os.environ["HONE_REWARD"], "w") as file:
    json.dump({"reward": said.count("e"), "calls": agent.n_calls}, file)
