"""An HTTP server for any number of models: OpenAI's API and others, over one engine loop per model."""
