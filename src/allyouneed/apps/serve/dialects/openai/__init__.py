"""OpenAI's API, one endpoint family per file."""
