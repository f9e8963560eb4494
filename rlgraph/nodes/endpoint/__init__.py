"""An endpoint that speaks OpenAI's chat completions, for agent programs that nobody changed."""
