"""Cut a batch for ranks and passes: pure functions, the same for trainers and predictions."""
