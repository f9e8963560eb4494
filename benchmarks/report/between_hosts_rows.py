"""The rows of docs/benchmarks.md about batches between two hosts, which `between_hosts.py` measures."""

from benchmarks.lib.figures import ms
from benchmarks.report.table import Row


def row(what: str, way: str, measure: str, name: str, peer: str) -> Row:
    file = "between_hosts_cpu.json"
    found, beside = (ms(file, "ways", of, measure, "median_s") for of in (way, peer))
    return Row(what, found, "benchmarks/speed/between_hosts.py", name, beside)


PLAIN, IN_PLAIN = ("plain socket", "plain socket"), ("not encrypted", "rlgraph")
BETWEEN_HOSTS = [
    row("16 MiB between two hosts", "rlgraph", "hop", *PLAIN),
    row("8 times 16 MiB between two hosts, in a row", "rlgraph", "stream", *PLAIN),
    row("16 MiB between two hosts, `encrypt=True`", "rlgraph, encrypted", "hop", *IN_PLAIN),
    row("8 times 16 MiB between two hosts, in a row, `encrypt=True`", "rlgraph, encrypted", "stream", *IN_PLAIN),
]
