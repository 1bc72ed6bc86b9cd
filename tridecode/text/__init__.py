"""Conversion of prompts to token ids and of token ids to text; grammars for structured output."""
