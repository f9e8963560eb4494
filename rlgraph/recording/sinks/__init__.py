"""Loggers to which `rg.record(job, steps, folder, to=[…])` sends a run: TensorBoard, Weights & Biases, MLflow, or one of your own."""

from rlgraph.recording.sinks.base import RecordedRun, Sink
from rlgraph.recording.sinks.mlflow import MLflow
from rlgraph.recording.sinks.tensorboard import TensorBoard
from rlgraph.recording.sinks.wandb import WandB

__all__ = ["MLflow", "RecordedRun", "Sink", "TensorBoard", "WandB"]
