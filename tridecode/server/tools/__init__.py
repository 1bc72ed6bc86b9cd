"""Tool calls: definitions for the chat template, parsing of calls, and grammars that enforce them."""
