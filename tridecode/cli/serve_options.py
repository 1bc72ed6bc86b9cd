"""The options of `serve`. Nothing here imports torch: `--help` answers at once."""

from .values import name, origin, port, positive, seconds

SERVE = """\
Serve a model over HTTP, by OpenAI's and Anthropic's APIs: /v1/chat/completions, /v1/responses,
/v1/messages and more. docs/serving.md has all of it.
Ctrl-C or SIGTERM lets running requests finish for the grace time; a second one ends at once.
"""
SERVE_CODES = """\
Exit codes: 0 stopped, 1 error, 2 wrong options, 3 the engine failed, 130 or 143 stopped at once.
"""


def serve_options(serve) -> None:
    """The options of `serve` alone; args.refuse(message) ends as a wrong option does."""
    serve.epilog = SERVE_CODES
    serve.set_defaults(refuse=serve.error)
    group = serve.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", metavar="HOST", help="address to listen on (127.0.0.1)")
    group.add_argument("--port", type=port, default=8000, metavar="N", help="0 takes any that is free (8000)")
    words = "of the model (its id, or its directory's name)"
    group.add_argument("--served-model-name", type=name, metavar="NAME", help=words)
    group.add_argument("--any-model", action="store_true", help="serve requests for any model, or for none, with it")
    queue = "requests that may wait for a slot; more are told to come again (256)"
    group.add_argument("--max-queue", type=positive, default=256, metavar="N", help=queue)
    group.add_argument("--timeout", type=seconds, default=600.0, metavar="S", help="of a request, 0 is none (600)")
    group.add_argument("--grace", type=seconds, default=10.0, metavar="S", help="for running requests at the end (10)")
    group.add_argument("--api-key-file", metavar="FILE", help="one line; without it TRIDECODE_API_KEY, if set")
    group.add_argument("--ssl-certfile", metavar="FILE", help="a certificate: serve https")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="its key, if another file has it")
    origins = "a web page's origin that may ask, like https://chat.example, or *; repeatable (default: none)"
    group.add_argument("--cors", action="append", type=origin, metavar="ORIGIN", help=origins)
    group.add_argument("--log-prompts", action="store_true", help="log what is asked too")
