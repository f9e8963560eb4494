"""The profiles in the folder of a run: traces and memory snapshots, named by worker and steps."""

from pathlib import Path

FOLDER = "profiles"
TRACE, OPERATORS, MEMORY = ".trace.json.gz", ".operators.txt", ".memory.pickle"
KINDS = {
    TRACE: "trace of torch.profiler: open it in ui.perfetto.dev",
    OPERATORS: "table of its operators",
    MEMORY: "history of CUDA's memory: open it in pytorch.org/memory_viz",
}


def profile_files(folder: str | Path) -> list[tuple[Path, str]]:
    """List the files of profiles of a run's folder, each with what it is."""
    found = sorted((Path(folder) / FOLDER).glob("*"))
    return [(path, said) for path in found for ending, said in KINDS.items() if path.name.endswith(ending)]
