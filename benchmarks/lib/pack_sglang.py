"""Pack SGLang for a machine with a Hopper GPU that reaches no package index.

    python benchmarks/lib/pack_sglang.py OUT     # one folder, under 58 MiB
    bash OUT/unpack.sh [SITE]                    # there: unpacks into SITE, ~/sglang-gpu otherwise

The machine has Python 3.12, torch 2.11 for CUDA 13 with its triton and torchvision, transformers 5.12 or newer, nvcc and ninja.
Left out is what text models in bfloat16 do not load: images and video, servers in Rust, kernels for other GPUs, and FlashAttention 3,
which alone has more than a gigabyte: attention is SGLang's in Triton. Small kernels, of norms say, are compiled there in the first start.

SITE may stand on PYTHONPATH beside a folder with vLLM. Packages that both need are packed in the versions that vLLM 0.26 takes.
Downloads are kept in ~/.cache/rlgraph-sglang-wheels.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

CACHE = Path.home() / ".cache" / "rlgraph-sglang-wheels"
PLATFORMS = [f"manylinux_2_{number}_x86_64" for number in (34, 31, 28, 27, 26, 24, 17)] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
MOST = 58 << 20  # bytes
LOCK = Path(__file__).parents[2] / "requirements" / "sglang-gpu.lock"  # in the versions that vLLM 0.26 runs with
STRIPPED = ("sglang", "sglang-kernel", "torch-memory-saver")
DROP = (  # beginnings of names
    "sglang/multimodal_gen/", "sglang/test/", "sglang/benchmark/", "sglang/eval/", "sglang/srt/server/", "sglang/srt/grpc/",
    "sgl_kernel/flash_ops", "sgl_kernel/infllm_ops", "sgl_kernel/flashmla_ops", "sgl_kernel/sm100/", "triton_kernels/",
    "torch_memory_saver_hook_mode_preload.", "torch_memory_saver_hook_mode_torch.", "torch_memory_saver_hook_mode_preload_cu12",
    "torch_memory_saver_hook_mode_torch_cu12",
)  # fmt: skip
UNPACK = r"""set -e
cd "$(dirname "$0")"; site=${1:-$HOME/sglang-gpu}; mkdir -p "$site"
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" ./*.whl
for archive in *.tar.xz; do tar xJf "$archive" -C "$site"; done
du -sh "$site"
"""


def download(requirement: str) -> Path:
    """Fetch the wheel of `requirement` for the machine, from the index once."""
    folder = CACHE / requirement.replace("=", "_")
    if not (found := list(folder.glob("*.whl"))):
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.12"]
        command += ["--implementation", "cp", "-d", str(folder), requirement]
        command += [part for platform in PLATFORMS for part in ("--platform", platform)]
        subprocess.run(command, check=True)
        found = list(folder.glob("*.whl"))
    return found[0]


def strip(wheel: Path, out: Path) -> None:
    """Unzip `wheel` without what is left out, into one archive in `out`."""
    tree = out / "tree"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tree, [name for name in archive.namelist() if not name.startswith(DROP)])
    with tarfile.open(out / f"{wheel.name.split('-')[0]}.tar.xz", "w:xz", preset=6) as packed:
        packed.add(tree, arcname=".")
    shutil.rmtree(tree)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="its earlier contents are removed")
    out: Path = parser.parse_args().out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / "unpack.sh").write_text(UNPACK)
    for requirement in LOCK.read_text().split():
        wheel = download(requirement)
        if requirement.split("==")[0] in STRIPPED:
            strip(wheel, out)
        else:
            shutil.copy(wheel, out)
    for file in sorted(out.iterdir()):
        print(f"{file.stat().st_size / 2**20:6.2f} MiB  {file.name}")
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{size / 2**20:.1f} MiB in {out}")
    if size > MOST:
        raise SystemExit(f"{out} is over {MOST >> 20} MiB: leave more out in DROP")


if __name__ == "__main__":
    main()
