"""Assign the sequences of a batch to ranks and passes: one pure function for trainers and predictions."""
