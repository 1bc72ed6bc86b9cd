"""Requests: who has which slot, who runs next, and what comes out."""
