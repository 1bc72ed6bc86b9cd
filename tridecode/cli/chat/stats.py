"""The output of /stats: the model, GPU memory and bandwidth, the conversation."""

from functools import cache

import torch

from ...plan.memory import GIB, free_memory
from ..bench.measure import step_bytes
from ..bench.read import measure_read_bandwidth
from ..terminal import counted, speed_line

MIN_BYTES = 2**28  # Minimum bytes to read for a measurement. Every cache is smaller.


def lines(chat) -> list[str]:
    """Return the lines of /stats for a talk.Chat."""
    rows, turns, dropped = chat.model.facts(chat.last), len(chat.conversation.turns), chat.conversation.dropped
    rows.append(counted(turns, "turn") + (f", {turns - dropped:,} of them sent to the model" if dropped else ""))
    if chat.last is None:
        rows.append(f"{chat.describe_capacity()}, no complete answer yet")
    else:
        rows.append(f"last answer: {speed_line(chat.last.usage, chat.last.timings, chat.model.capacity, chat.seed)}")
    answers = counted(chat.answers, "answer")
    rows.append(f"{counted(chat.tokens, chat.model.unit)} in {answers} since the start, {chat.seconds:.1f} s in all")
    if chat.store:
        rows.append(f"session {chat.store.name} in {chat.store.path.parent}")
    return rows


def engine_lines(engine, last) -> list[str]:
    """Return the lines about an engine. last: the last chunk of the latest answer, or None."""
    facts = [f"model {engine.name} on {engine.device}", f"backend {engine.backend}", f"graph {engine.graph}"]
    drafts = "ngram {}:{}".format(*engine.plan.ngram) if engine.plan.ngram else "off"
    rows = [", ".join([*facts, f"speculation {drafts}"])]
    return rows + (gpu_lines(engine, last) if engine.device.type == "cuda" else [])


def gpu_lines(engine, last) -> list[str]:
    """Return the lines about GPU memory and the share of the read bandwidth that the last answer used."""
    free, whole = torch.cuda.mem_get_info(engine.device)
    reserved = torch.cuda.memory_reserved(engine.device)
    rows = [f"GPU memory: {gib(reserved)} GiB by this chat, {gib(whole - free)} of {gib(whole)} GiB in use"]
    rate = 0.0 if last is None else last.timings.tokens_per_second
    if rate:
        bandwidth = read_bandwidth(engine.device)
        if bandwidth is None:
            rows.append("bandwidth: not measured, because too little memory is free")
        else:
            needed = step_bytes(engine, last.usage.prompt_tokens, last.usage.completion_tokens)
            rates = f"{bandwidth / 1e9:,.0f} GB/s, {needed / 1e9:.2f} GB a token"
            rows.append(f"{100 * needed * rate / bandwidth:.0f}% of the read bandwidth ({rates})")
    return rows


@cache
def read_bandwidth(device: torch.device) -> float | None:
    """Return bytes per second, measured at the first call; None if too little memory is free."""
    nbytes = min(2**32, free_memory(device) // 2)
    if nbytes < MIN_BYTES:
        return None
    with torch.cuda.device(device):  # Triton launches kernels on the current device.
        bandwidth = measure_read_bandwidth(device, nbytes)
        torch.cuda.empty_cache()  # Free the buffer of the measurement.
    return bandwidth


def gib(nbytes: int) -> str:
    """Return a number of bytes in GiB."""
    return f"{nbytes / GIB:.1f}"
