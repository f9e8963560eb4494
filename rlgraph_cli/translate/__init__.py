"""What the commands share that turn the training of another library into a recipe: `from-verl` and `from-trl`."""
