"""The Mermaid text of a plan has every node, edge and loop, and no name can break it."""

import re

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rlgraph.analysis.words import clean
from rlgraph.plan.plan import Plan
from rlgraph.render.plan_layout import drawn_channels
from rlgraph.render.text import mermaid

STRING = r'"(?:[^"#;]|#\d+;)+"'
LINES = [
    r"  subgraph p\d+\[" + STRING + r"\]",
    r"    n\d+\[" + STRING + r"\]",
    r"  end",
    r"  n\d+ (?:-->|-\.->)\|" + STRING + r"\| n\d+",
    r"  linkStyle [\d,]+ stroke:#\w+,color:#\w+",
    r"  classDef critical stroke:#\w+,stroke-width:2px",
    r"  class [n\d,]+ critical",
]


def decoded(text: str) -> str:
    return re.sub(r"#(\d+);", lambda match: chr(int(match[1])), text)


@settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_plan_gives_lines_of_the_grammar_with_each_node_edge_and_loop(
    random_plans: st.SearchStrategy[Plan], data: st.DataObject
) -> None:
    plan = data.draw(random_plans)
    front, title, back, kind, *lines = mermaid(plan).rstrip("\n").split("\n")
    assert (front, title[:8], title[-1], back, kind) == ("---", "title: '", "'", "---", "flowchart LR")
    assert [line for line in lines if not any(re.fullmatch(rule, line) for rule in LINES)] == []
    text = decoded("\n".join(lines))
    assert all(f'["{clean(node.name)} ' in text for node in plan.nodes)
    assert sum(" -->|" in line for line in lines) == sum(len(channel.readers) for channel in drawn_channels(plan))
    assert sum(" -.->|" in line for line in lines) == sum(len(loop.readers) for loop in plan.loops)
    assert sum(line.startswith("  subgraph") for line in lines) == sum(line == "  end" for line in lines)


def test_nodes_stand_in_the_subgraph_of_their_pool(plans: dict[str, Plan]) -> None:
    text = mermaid(plans["one_step_off"])
    body = text[text.index('["rollout: 2 GPUs') : text.index("  end")]
    assert '["rollout ~3.00 s"]' in body
    assert "policy.update" not in body


def test_the_back_edge_is_dotted_and_says_its_depth(plans: dict[str, Plan]) -> None:
    assert '-.->|"weights: depth 1 (staleness at most 1), 1 buffer, peer"|' in mermaid(plans["one_step_off"])
