"""An agent of smolagents that nobody changed, as a command: it calls a tool, and prints its reward.

python smolagents_program.py QUESTION ANSWER
"""

import os
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two whole numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


model = OpenAIServerModel(model_id="policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent(tools=[add], model=model, max_steps=3, verbosity_level=0)
found = agent.run(sys.argv[1])
print(float(str(found) == sys.argv[2]))
