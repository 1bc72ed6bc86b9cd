"""HTTP server with OpenAI's and Anthropic's APIs over an Engine. It needs the extra `serve`; cli/serve.py starts it."""
