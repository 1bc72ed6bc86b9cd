"""The HTTP server: OpenAI's API over an Engine. It needs the extra `serve`; cli/serve.py starts it."""
