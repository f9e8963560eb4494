"""A graph of LangGraph that nobody changed, as a command: a model with a tool, in a loop. It prints its reward.

python langgraph_program.py QUESTION ANSWER
"""

import os
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


model = ChatOpenAI(model="policy", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]).bind_tools([add])


def call_model(state: MessagesState) -> dict:
    return {"messages": [model.invoke(state["messages"])]}


builder = StateGraph(MessagesState)
builder.add_node("model", call_model)
builder.add_node("tools", ToolNode([add]))
builder.add_edge(START, "model")
builder.add_conditional_edges("model", tools_condition)
builder.add_edge("tools", "model")
graph = builder.compile()

found = graph.invoke({"messages": [("system", "Add with your tool."), ("user", sys.argv[1])]})
print(float(sys.argv[2] in found["messages"][-1].content))
