"""The child process of encoder.py: one tokenizer, a text in and its token ids out, a line of JSON each.

It is run as a file and imports nothing of the package. It may take argv[1] bytes of memory, and processor time as each
request says; the parent's clock ends it where it is stuck.
"""

import json
import resource
import sys
import time

import tokenizers


def limit(kind: int, value: int, forever: bool = True) -> None:
    """Lower a limit of this process, for ever or until the next call."""
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value if forever else hard))


def reply(value) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main(memory: int) -> None:
    limit(resource.RLIMIT_AS, memory)
    limit(resource.RLIMIT_CORE, 0)
    source = json.loads(sys.stdin.readline())
    try:
        tokenizer, failure = tokenizers.Tokenizer.from_str(source), None
    except BaseException as error:  # a panic of the library is no Exception
        tokenizer, failure = None, str(error)
    reply("ready")
    for line in sys.stdin:
        text, around, seconds = json.loads(line)
        limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + seconds, forever=False)
        try:
            reply({"ids": tokenizer.encode(text, add_special_tokens=around).ids} if tokenizer else {"error": failure})
        except BaseException as error:
            reply({"error": str(error)})


if __name__ == "__main__":
    main(int(sys.argv[1]))
