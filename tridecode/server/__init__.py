"""The HTTP server: OpenAI's API over an Engine. It needs the extra `serve`; commands/serve.py starts it."""
