"""The rows of batches and messages between workers: `channels.py`, `direct_transport.py`, `dispatch.py` and `between_hosts.py`."""

from benchmarks.lib.figures import Figure, ms, percent
from benchmarks.report.between_hosts_rows import BETWEEN_HOSTS
from benchmarks.report.table import Row

DIRECT = "direct_transport_cpu.json"
HOPS, HOPS_BY_RAY = "channels_cpu.json", "channels_ray_cpu.json"  # the second is of a busier machine: compare rows of one run alone


def hop(transport: str, size: int, form: str = "{:.1f} ms", file: str = HOPS) -> Figure:
    return ms(file, "hops", {"transport": transport, "size": size}, "median_s", form=form)


MIB, BY_RAY = 1 << 20, "rlgraph ray"
PEERS_OF_HOPS = ("native edge", "native edge, zero-copy", "Ray object store", "Ray object store, zero-copy", "torch.multiprocessing queue")
NATIVE = "edge of Ray's Compiled Graphs"
PEERS_IN_WORDS = {"native edge": NATIVE, "native edge, zero-copy": f"{NATIVE}, zero-copy"}
HOP_SIZES = (
    ("1 KiB", 1 << 10, "{:.2f} ms"),
    ("16 MiB", 16 * MIB, "{:.1f} ms"),
)
CHANNELS = [
    *(
        Row("16 MiB from worker to worker", hop("rlgraph shm", 16 * MIB), "benchmarks/speed/channels.py",
            PEERS_IN_WORDS.get(peer, peer), hop(peer, 16 * MIB))
        for peer in PEERS_OF_HOPS
    ),
    *(
        Row(f"{name} through `transport=\"ray\"`", hop(BY_RAY, size, form, HOPS_BY_RAY), "benchmarks/speed/channels.py",
            other, hop(other, size, form, HOPS_BY_RAY))
        for name, size, form in HOP_SIZES
        for other in ("rlgraph shm", f"{BY_RAY}, zero-copy", "rlgraph tcp")
    ),
    *(
        Row(f"{name} to another worker, on a busy machine", hop("rlgraph shm", size, form, DIRECT), "benchmarks/speed/direct_transport.py",
            "Ray Direct Transport, gloo", hop("Ray Direct Transport", size, form, DIRECT))
        for name, size, form in (("1 KiB", 1 << 10, "{:.2f} ms"), ("1 MiB", MIB, "{:.1f} ms"), ("256 MiB", 256 * MIB, "{:.0f} ms"))
    ),
    *BETWEEN_HOSTS,
    Row("1 KiB there and back", ms(HOPS, "round_trips", {"transport": "rlgraph shm"}, "median_s", form="{:.2f} ms"),
        "benchmarks/speed/channels.py", "torch queue", ms(HOPS, "round_trips", {"transport": "torch.multiprocessing queue"}, "median_s")),
    Row("share of a core that a waiting worker uses", percent(HOPS, "waiting", "rlgraph shm"), "benchmarks/speed/channels.py",
        NATIVE, percent(HOPS, "waiting", "native edge", form="{:.0f} %")),
    Row("share of a core that a waiting worker uses, `transport=\"ray\"`", percent(HOPS_BY_RAY, "waiting", BY_RAY),
        "benchmarks/speed/channels.py", NATIVE, percent(HOPS_BY_RAY, "waiting", "native edge", form="{:.0f} %")),
    *(
        Row(f"an empty step of 4 workers that {started}", ms("dispatch_cpu.json", f"empty step, {kind}", "median_s", form="{:.2f} ms"),
            "benchmarks/speed/dispatch.py", "Ray's plain actor calls",
            ms("dispatch_cpu.json", "empty step, plain actor calls", "median_s", form="{:.2f} ms"))
        for kind, started in (("Compiled Graph", "a Compiled Graph started"), ("rlgraph over calls", "actor calls started"))
    ),
]  # fmt: skip
