"""How a batch is cut for ranks and passes: one pure function that trainers run and predictions count with."""
