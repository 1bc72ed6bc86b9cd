"""Requests, their queue, the scheduler and the output of passes."""
