"""The profiles in the folder of a run: traces and memory snapshots, named by worker and steps."""

from pathlib import Path

FOLDER = "profiles"
KINDS = {
    ".trace.json": "trace of torch.profiler, for ui.perfetto.dev",
    ".memory.pickle": "snapshot of CUDA's memory, for pytorch.org/memory_viz",
}


def profile_files(folder: str | Path) -> list[tuple[Path, str]]:
    """List the files of profiles of a run's folder, each with what it is."""
    found = sorted((Path(folder) / FOLDER).glob("*"))
    return [(path, said) for path in found for ending, said in KINDS.items() if path.name.endswith(ending)]
