"""Export a model from a checkpoint, in one process that holds one shard of one parameter at a time, without an engine."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from rlgraph.analysis.run import CardFacts
from rlgraph.engines.hf.backbone import parts_of
from rlgraph.engines.hf.export import AdapterForm, ExportDtype, Exported, ExportLayout, check_target, write_shards
from rlgraph.engines.hf.folder_weights import folder_shards
from rlgraph.engines.hf.model_files import VISION
from rlgraph.engines.hf.pretrained import parameter_shapes
from rlgraph.engines.registry import TRAINERS, SavedShard
from rlgraph.errors import CheckpointError, ExportError
from rlgraph.plan.plan import Plan
from rlgraph.runtime.checkpoint.export import Source, base_of, boxes, check_source, write_export
from rlgraph.runtime.checkpoint.store import TrainedEntry, check_apart, checked_manifest, checkpoint_steps, choose_model


def export_checkpoint(
    checkpoint: str | Path,
    folder: str | Path,
    dtype: ExportDtype,
    policy: str | None,
    adapter: AdapterForm,
    card: Callable[[Plan, CardFacts], str],
) -> Exported:
    """Export a model of a checkpoint, or of the newest one in a folder of checkpoints; see `rlgraph.api.export`."""
    found = newest_checkpoint(Path(checkpoint))
    where = f"export('{folder}')"
    check_target(folder)
    manifest = checked_manifest(found)
    chosen_model = _choose_entry(manifest, policy, where, found)
    there = Path(manifest.get("folder", ".")) / chosen_model.path  # the run may have started in another working folder
    model = (
        chosen_model if Path(chosen_model.path).exists() or not there.exists() else msgspec.structs.replace(chosen_model, path=str(there))
    )
    check_source(model, where)
    check_apart(model, adapter, where)
    shards = _find_shards(model, found, where)
    known, vision = parameter_shapes(model.path), any(shard.box.name.startswith(VISION) for shard in shards)
    renamed = model.adapter is None and not all(shard.box.name in known for shard in shards)
    parts = parts_of(model.path, model.scores, vision=vision) if renamed else {}
    base = base_of(chosen_model.path)
    facts = CardFacts(model.name, base, manifest["step"], dtype, manifest["settings"], **manifest.get("figures", NO_FIGURES))
    source = Source(model, manifest["step"], card(Plan.from_json((found / "plan.json").read_text()), facts), adapter)

    def write(path: Path, layout: ExportLayout) -> None:
        write_shards(path, layout, folder_shards((replace(shard.box, tensor=shard.read()) for shard in shards), parts))

    return write_export(folder, source, dtype, [boxes(folder_shards((shard.box for shard in shards), parts))], write)


NO_FIGURES: Mapping[str, Mapping[str, float]] = {"first": {}, "last": {}}


def newest_checkpoint(folder: Path) -> Path:
    """Find the checkpoint: the folder itself, or the newest one in it. Raises CheckpointError if there is none."""
    if (folder / "manifest.json").exists():
        return folder
    steps = checkpoint_steps(folder)
    if not steps:
        there = "is not a checkpoint and holds none" if folder.is_dir() else "does not exist"
        raise CheckpointError(f"'{folder}' {there}; pass a folder such as `step-00000100`, or the one that launch(checkpoint=…) named")
    return steps[max(steps)]


def _choose_entry(manifest: Mapping[str, Any], policy: str | None, where: str, checkpoint: Path) -> TrainedEntry:
    if "models" not in manifest:
        raise ExportError(
            f"{where}: checkpoint '{checkpoint}' is of an older version, which did not name its models; resume it and save again"
        )
    return choose_model(msgspec.convert(manifest["models"], list[TrainedEntry]), policy, where)


def _find_shards(model: TrainedEntry, checkpoint: Path, where: str) -> list[SavedShard]:
    spec = TRAINERS.find(model.trainer) if model.trainer in TRAINERS.names() else None
    if spec is None or spec.saved_shards is None:
        why = "is not registered here" if spec is None else "gives no `saved_shards`, by which its checkpoints are read"
        raise ExportError(
            f"{where}: the trainer '{model.trainer}' of '{model.name}' {why}; export from the running job: job.export(folder)"
        )
    return list(spec.saved_shards(checkpoint / model.name))
