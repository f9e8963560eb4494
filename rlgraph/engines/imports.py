"""What the engines on torch and transformers import, for a process from which workers are forked."""

from importlib import import_module

MODULES = (
    "rlgraph.engines.forward.self_test",
    "rlgraph.engines.fsdp.engine",
    "rlgraph.engines.fsdp.sharding",
    "rlgraph.engines.hf_models.chat_template",
    "rlgraph.engines.transformers.engine",
    "rlgraph.engines.transformers.engine",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.modeling_layers",
    "transformers.processing_utils",
)


def import_transformers() -> None:
    """Import what trainers on FSDP2, engines on transformers and tokenizers need; it opens no GPU."""
    for module in MODULES:
        import_module(module)
