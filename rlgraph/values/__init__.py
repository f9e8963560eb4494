"""Values that all layers name: how responses are sampled, adapters, drafts."""
