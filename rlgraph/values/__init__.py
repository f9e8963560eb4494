"""Values that all layers name: optimizers, how a trainer computes, adapters, how responses are sampled, drafts."""
