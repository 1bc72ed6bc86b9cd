"""Helpers for the tests of `generate`."""

import json

LIMITS = ("--temperature", "0", "--max-tokens", "5", "--device", "cpu")


def user(text):
    return {"role": "user", "content": text}


def lines(text):
    return [json.loads(line) for line in text.splitlines()]
