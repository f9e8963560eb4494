"""Pack FlashAttention 4 for a machine with a Hopper GPU that reaches no package index.

    python benchmarks/lib/pack_flash.py OUT      # two folders, OUT/0 and OUT/1, each under 58 MiB
    bash OUT/0/unpack.sh [SITE]                  # there, and OUT/1/unpack.sh after it: unpacks into SITE, ~/flash-gpu otherwise

The machine has Python 3.12 and torch 2.11 for CUDA 13. SITE goes on PYTHONPATH. Packages are those that vLLM 0.26 takes as well.
Downloads are kept in the same folder as those of `pack_sglang.py`.
"""

import argparse
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.pack_sglang import MOST, download

LOCK = Path(__file__).parents[2] / "requirements" / "flash-gpu.lock"
DROP = "nvidia_cutlass_dsl/cu13/lib/stubs/", "nvidia_cutlass_dsl/lib/stubs/"  # for other processors
INNER = "nvidia_cutlass_dsl/python_packages", "nvidia_cutlass_dsl/dsl_packages"  # added by a .pth file, which PYTHONPATH does not read
UNPACK = r"""set -e
cd "$(dirname "$0")"; site=${1:-$HOME/flash-gpu}; mkdir -p "$site"; cp half.* "$site"
cd "$site"
if [ -f half.0 ] && [ -f half.1 ]; then cat half.0 half.1 | tar xJ; rm half.0 half.1; du -sh "$site"; fi
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="its earlier contents are removed")
    out: Path = parser.parse_args().out
    shutil.rmtree(out, ignore_errors=True)
    tree = out / "tree"
    tree.mkdir(parents=True)
    for requirement in LOCK.read_text().split():
        with zipfile.ZipFile(download(requirement)) as archive:
            archive.extractall(tree, [name for name in archive.namelist() if not name.startswith(DROP)])
    for inner in (name for name in INNER if (tree / name).is_dir()):
        for package in (tree / inner).iterdir():
            (tree / package.name).symlink_to(Path(inner) / package.name)
    whole = out / "whole.tar.xz"
    with tarfile.open(whole, "w:xz", preset=6) as packed:
        packed.add(tree, arcname=".")
    shutil.rmtree(tree)
    content = whole.read_bytes()
    whole.unlink()
    middle = len(content) // 2
    for number, half in enumerate((content[:middle], content[middle:])):
        folder = out / str(number)
        folder.mkdir()
        (folder / f"half.{number}").write_bytes(half)
        (folder / "unpack.sh").write_text(UNPACK)
        print(f"{len(half) / 2**20:.1f} MiB in {folder}")
        if len(half) > MOST:
            raise SystemExit(f"{folder} is over {MOST >> 20} MiB: leave more out in DROP")


if __name__ == "__main__":
    main()
