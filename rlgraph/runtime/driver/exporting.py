"""Export from a running job: its workers write their own shards, between two steps."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlgraph.engines.hf_export.folder import Exported, check_target
from rlgraph.engines.hf_export.layout import AdapterForm, ExportDtype, ExportLayout
from rlgraph.graph.nodes import Graph
from rlgraph.plan.plan import Plan
from rlgraph.runtime import messages
from rlgraph.runtime.checkpoint.store import Checkpoints
from rlgraph.runtime.driver.session import Session
from rlgraph.runtime.exports.models import check_apart, chosen, trained_models
from rlgraph.runtime.exports.write import Source, check_source, model_card, write_export


@dataclass
class JobExports:
    """The exports of a job: those that its user asks for, and one every few steps among its checkpoints."""

    graph: Graph
    plan: Plan
    checkpoints: Checkpoints | None
    first: Mapping[str, float] = field(default_factory=dict)  # metrics of the run's first step and of the last one
    last: Mapping[str, float] = field(default_factory=dict)

    def note(self, metrics: Mapping[str, float]) -> None:
        """Remember the metrics of a step, for the model card."""
        self.first = (self.checkpoints.figures.get(0) if self.checkpoints else None) or self.first or metrics
        self.last = metrics

    def next_due(self, finished: int) -> int:
        """The step after which the next export is due: no step beyond it is begun before."""
        every = self.checkpoints.recovery.export_every if self.checkpoints else None
        return sys.maxsize if every is None else (finished // every + 1) * every

    def due(self, finished: int) -> Path | None:
        """The folder of the export that is due after `finished` steps; None if there is none, or it is there."""
        recovery = self.checkpoints.recovery if self.checkpoints else None
        if recovery is None or recovery.export_every is None or finished % recovery.export_every:
            return None
        folder = recovery.export(finished)
        return None if folder.exists() else folder

    def write(self, session: Session, folder: str | Path, dtype: ExportDtype, policy: str | None, adapter: AdapterForm) -> Exported:
        """Export a model of a session, once its steps in flight are done.

        Raises ExportError where the folder cannot be made whole, with the session unharmed; else as `Session.step` does.
        """
        where = f"export('{folder}')"
        model = chosen(trained_models(self.graph, self.plan), policy, where)
        check_target(folder)
        check_source(model, where)
        check_apart(model, adapter, where)
        held = session.shards(model.name)

        def write(path: Path, layout: ExportLayout) -> None:
            for answer in session.write_shards(model.name, messages.WriteShards(str(path), layout)):
                if answer.refused:
                    raise OSError(answer.number, os.strerror(answer.number)) if answer.number else OSError(answer.refused)

        card = model_card(self.graph, self.plan, model, held[0].step, dtype, self.first, self.last)
        return write_export(folder, Source(model, held[0].step, card, adapter), dtype, [found.boxes for found in held], write)
