"""Agents, their environments and programs, what they say, and where the code that they write runs."""

from rlgraph.nodes.environments.agent import Agent as Agent
from rlgraph.nodes.environments.agent import Environment as Environment
from rlgraph.nodes.environments.messages import Message as Message
from rlgraph.nodes.environments.messages import ToolCall as ToolCall
from rlgraph.nodes.environments.messages import Turn as Turn
from rlgraph.nodes.environments.program import AgentClient as AgentClient
from rlgraph.nodes.environments.program import Program as Program
from rlgraph.nodes.environments.tools import Tools as Tools
from rlgraph.nodes.sandbox import Executed as Executed
from rlgraph.nodes.sandbox import LocalSandbox as LocalSandbox
from rlgraph.nodes.sandbox import Sandbox as Sandbox
from rlgraph.nodes.sandbox import ToolError as ToolError
