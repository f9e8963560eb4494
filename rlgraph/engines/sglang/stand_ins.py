"""Stand-ins for packages that SGLang imports and dense models have no use for, so that it loads without them.

On a CPU they take the place of its kernels too, of which the package index has no build for CPUs. Attention is then PyTorch's own, and of
the kernels one is needed.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any, NoReturn

import torch

# The kernels that SGLang imports by name on a CPU, besides the one below: for speculative decoding and moved caches.
UNUSED = (
    "copy_all_layer_kv_cache_cpu",
    "assign_extend_cache_locs_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "build_tree_kernel_efficient_cpu",
    "verify_tree_greedy_cpu",
)
# What it imports of FlashInfer on a GPU even where that is not available: for weights of eight bits, and for its own sampler.
FLASHINFER = {
    "flashinfer": ("bmm_fp8",),
    "flashinfer.sampling": ("min_p_sampling_from_probs", "top_k_top_p_sampling_from_probs"),
    "flashinfer.fused_moe": ("fused_topk_deepseek",),
    "flashinfer.prefill": ("cudnn_batch_prefill_with_kv_cache",),
}


def install() -> None:
    """Put a stand-in in place of each package that is absent. Call it before SGLang is imported."""
    if _absent("IPython"):
        _module("IPython")
        _module("IPython.display", HTML=object, display=print)
    if torch.cuda.is_available():
        sys.modules.setdefault("vllm", None)  # type: ignore[arg-type]  # which SGLang imports where it is, for seconds and to no use
        if _absent("flashinfer"):
            os.environ["SGLANG_IS_FLASHINFER_AVAILABLE"] = "false"
            for module, names in FLASHINFER.items():
                _module(module, **{name: _unused(f"{module}.{name}") for name in names})
        return
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    _triton()
    if _absent("torchvision"):
        importlib.import_module("transformers.utils.import_utils")  # finds out first that there is no torchvision
        _module("torchvision")
        _module("torchvision.io", decode_jpeg=None)
        modes = types.SimpleNamespace(BICUBIC=3, BILINEAR=2, NEAREST=0)
        _module("torchvision.transforms", InterpolationMode=modes)
        _module("torchvision.transforms.functional", InterpolationMode=modes)
    if _absent("sgl_kernel"):
        kernels = {name: _unused(f"sgl_kernel.{name}") for name in UNUSED}
        _module("sgl_kernel", assign_req_to_token_pool_cpu=assign_req_to_token_pool_cpu, **kernels)


def register_configs_twice() -> None:
    """Let SGLang register configurations that transformers has by now too."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    register = CONFIG_MAPPING.register
    CONFIG_MAPPING.register = lambda key, value, exist_ok=False: register(key, value, exist_ok=True)


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, places: torch.Tensor, width: int
) -> None:
    """Write the `places` of new keys and values into the table `[requests, context]`, for each request from its start to its end."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = places[at : at + end - start].to(table.dtype)
        at += end - start


def _triton() -> None:
    """Install SGLang's own stand-in of triton, after the parts of PyTorch that it would break."""
    if not _absent("triton"):
        return
    for name in ("_inductor.runtime.triton_heuristics", "_inductor.codegen.triton", "_inductor.select_algorithm", "_dynamo"):
        importlib.import_module(f"torch.{name}")
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.submodule_search_locations is not None
    spec = importlib.util.spec_from_file_location("_sglang_triton", f"{package.submodule_search_locations[0]}/_triton_stub.py")
    assert spec is not None
    assert spec.loader is not None
    stand_in = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stand_in)
    stand_in.install()


def _absent(name: str) -> bool:
    return name not in sys.modules and importlib.util.find_spec(name) is None


def _module(name: str, **names: Any) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__dict__.update(names)
    sys.modules[name] = module


def _unused(name: str) -> Any:
    def refuse(*args: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"SGLang calls {name}, which is not installed here")

    return refuse
