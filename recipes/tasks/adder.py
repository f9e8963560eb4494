"""An agent program: it asks a model for a sum by the official `openai` client, and asks again until the answer is a number.

It knows nothing of rlgraph, and runs against any server that speaks OpenAI's chat completions:

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python recipes/tasks/adder.py "7 + 5"
"""

import asyncio
import sys
from typing import Any

from openai import AsyncOpenAI

SYSTEM = "You add numbers."
SHOWN = [("2 + 3", "5"), ("7 + 6", "13")]
TRIES = 3


async def add(llm: AsyncOpenAI, question: str, model: str = "policy") -> str:
    """Answer a question such as "7 + 5"; with nothing if no answer was a number."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for asked, answered in SHOWN:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    messages += [{"role": "user", "content": question}]
    for _ in range(TRIES):
        completion = await llm.chat.completions.create(model=model, messages=messages, max_tokens=6)
        said = (completion.choices[0].message.content or "").strip()
        if said.isdecimal():
            return said
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "The number alone, please."}]
    return ""


if __name__ == "__main__":
    print(asyncio.run(add(AsyncOpenAI(), sys.argv[1])))
