"""SGLang as an engine that generates: its scheduler inside this process, driven step by step."""
