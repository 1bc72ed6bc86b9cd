"""A discrete-event simulation of a fleet, with measured pass times and the policy of tridecode.fleet.

    python -m benchmarks.fleet_sim --replicas 1 8 64 --rate 1.5

The workload has the statistics of Mooncake's public trace of conversations (github.com/kvcache-ai/Mooncake,
FAST25-release/traces). pypi.org/project/llmtrafficlens/0.6.2 publishes them: 12,031 requests at 3.4 a second, a median
prompt of 6,909 tokens, a median answer of 350, one prefix of 512 tokens in all prompts. An unbounded cache would hold
37.4% of all prompt tokens, one of 16 million tokens 34.2%, one of 4 million 18.5%. The mean number of turns and the
median message are set so that prompts have this median and this reuse. The mean pause between turns, 175 s, follows
from the two smaller caches. The first 76 requests of the trace give the spread: the logarithms of their prompt lengths
have a standard deviation of 1.07, their answers one of 212 tokens. Conversations arrive as a Poisson process, and end
at the context length of the model.

A replica computes waiting prompts first, while running requests continue at the pace of chunks, and then decodes. Its
cache holds the conversations that it has seen last. Prints one JSON object for each run.

Pass times were measured with Qwen3-4B on an H100: a decode pass by rows, and the time to the first token of prompts of
64, 2,048 and 32,000 tokens, through which a parabola goes.
"""

import argparse
import heapq
import itertools
import json
import math
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tridecode.fleet import peers
from tridecode.fleet.policy import Policy, Report, Ticket
from tridecode.fleet.prefix import Chain

SYSTEM_TOKENS, MESSAGE_TOKENS, MESSAGE_SPREAD = 512, 4000, 1.2
ANSWER_TOKENS, ANSWER_DEVIATION = 350, 212
TURNS, PAUSE_SECONDS = 1.53, 175.0
CONTEXT = 40_960
DECODE_MS = (1, 8, 32, 64), (2.791, 3.136, 3.693, 4.383)  # Rows, and ms of a pass.
PROMPT_MS = 2.8, 0.01116, 5.35e-7  # Constant, and by tokens, and by squared tokens.
CHUNK_MS = 15.0  # Time of a chunk of a prompt, in which each running request gets one token.
SLOTS = 32
CACHE_TOKENS = 400_000  # K/V positions of 144 KiB in the memory of one H100 next to the weights.
POLICIES = ("prefix", "load", "round_robin", "random")


def decode_seconds(rows: int) -> float:
    """Return the time of a decode pass, interpolated between the measured ones."""
    return float(np.interp(rows, *DECODE_MS)) / 1000


def prompt_seconds(reused: int, tokens: int) -> float:
    """Return the time of a prompt whose first tokens are reused."""
    constant, linear, square = PROMPT_MS
    return (constant + linear * (tokens - reused) + square * (tokens**2 - reused**2)) / 1000


@dataclass
class Conversation:
    """A conversation: the lengths of its turns, and its state."""

    number: int
    turns: list[tuple[int, int, float]]  # Tokens of the message, tokens of the answer, seconds before the next turn.
    done: int = 0
    tokens: int = SYSTEM_TOKENS  # Tokens before the next message.
    replica: str | None = None  # The replica of the last turn.

    def ticket(self) -> Ticket:
        """Return the ticket of the next turn: the hashes of the shared prefix and of the ends of the turns."""
        own = [hash((self.number, turn)) & (1 << 64) - 1 for turn in range(self.done + 1)]
        return Ticket(Chain((0, *own), 1))


@dataclass
class Request:
    """A turn that a replica computes."""

    conversation: Conversation
    policy: Policy
    ticket: Ticket
    arrived: float
    prompt: int
    answer: int


@dataclass
class Replica:
    """A replica."""

    waiting: deque[Request] = field(default_factory=deque)
    running: list[tuple[float, int, Request]] = field(default_factory=list)  # The first number is `clock` at the end.
    clock: float = 0.0  # Tokens that a request would have got that runs since the beginning.
    pace: float = 0.0  # Seconds of a token at present; 0 while the replica is idle.
    since: float = 0.0  # The time of `clock`.
    prompt: Request | None = None  # The request whose prompt is computed.
    plan: int = 0  # Number of the present plan, so that events of earlier plans are ignored.
    cached: OrderedDict[int, int] = field(default_factory=OrderedDict)  # Conversation -> tokens.
    size: int = 0  # Sum of these tokens.
    tokens: int = 0  # Tokens of answers that have ended.

    def store(self, conversation: Conversation, limit: int) -> None:
        """Cache the prefix of a conversation, and drop the least recently used ones."""
        self.size += conversation.tokens - self.cached.pop(conversation.number, 0)
        self.cached[conversation.number] = conversation.tokens
        while self.size > limit:
            self.size -= self.cached.popitem(last=False)[1]


class Simulation:
    """One run.

    Args:
        replicas: number of replicas.
        rate: requests a second.
        kind: one of POLICIES.
        gateways: number of gateways. Each turn arrives at any of them.
        seconds: simulated time, whose first half is not counted.
        cache: tokens that a replica can cache.
    """

    def __init__(self, replicas: int, rate: float, kind: str, gateways: int, seconds: float, cache: int):
        self.random, self.routing = random.Random(0), random.Random(0)  # All policies get the same workload.
        self.rate, self.seconds, self.warm, self.cache, self.kind = rate / TURNS, seconds, seconds / 2, cache, kind
        self.replicas = {f"r{i}": Replica() for i in range(replicas)}
        self.slots = dict.fromkeys(self.replicas, SLOTS)
        several = gateways > 1
        self.policies = [Policy(kind="load" if kind == "random" else kind, several=several) for _ in range(gateways)]
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.numbers = itertools.count()
        self.first: list[float] = []
        self.gaps: list[float] = []  # Mean seconds between the tokens of an answer.
        self.prompt = self.reused = self.returned = self.later = self.decisions = 0
        self.deciding = 0.0  # Seconds of this machine.

    def at(self, when: float, action: Callable[[float], None]) -> None:
        """Run `action` at a time."""
        heapq.heappush(self.events, (when, next(self.numbers), action))

    def run(self) -> dict:
        """Return the figures of the run."""
        self.at(0.0, self.begin)
        if len(self.policies) > 1:
            self.at(peers.SECONDS, self.exchange)
        while self.events[0][0] < self.seconds:
            now, _, action = heapq.heappop(self.events)
            action(now)
        tokens, counted = [each.tokens for each in self.replicas.values()], self.seconds - self.warm
        return {
            "replicas": len(self.replicas),
            "policy": self.kind,
            "gateways": len(self.policies),
            "requests": len(self.first),
            "first_token_ms_p50": quantile(self.first, 0.5),
            "first_token_ms_p99": quantile(self.first, 0.99),
            "token_ms_p50": quantile(self.gaps, 0.5),
            "reused": round(self.reused / max(self.prompt, 1), 3),
            "returned": round(self.returned / max(self.later, 1), 3),
            "tokens_per_s": round(sum(tokens) / counted),
            "most_tokens_over_mean": round(max(tokens) * len(tokens) / max(sum(tokens), 1), 2),
            "decisions_per_s_possible": round(self.decisions / max(self.deciding, 1e-9)),
        }

    def exchange(self, now: float) -> None:
        """Let the gateways exchange reports, and schedule the next time."""
        for number, policy in enumerate(self.policies):
            report = policy.report()
            for other in self.policies:
                if other is not policy:
                    other.receive(str(number), Report(dict(report.running), report.placed), now)
        self.at(now + peers.SECONDS, self.exchange)

    # ---- the workload

    def begin(self, now: float) -> None:
        """Begin a conversation, and schedule the beginning of the next one."""
        self.at(now + self.random.expovariate(self.rate), self.begin)
        turns = []
        while not turns or self.random.random() < 1 - 1 / TURNS:
            message = int(self.random.lognormvariate(math.log(MESSAGE_TOKENS), MESSAGE_SPREAD)) + 1
            answer = max(int(self.random.gauss(ANSWER_TOKENS, ANSWER_DEVIATION)), 1)
            turns.append((message, answer, self.random.expovariate(1 / PAUSE_SECONDS)))
        self.turn(now, Conversation(next(self.numbers), turns))

    def turn(self, now: float, conversation: Conversation) -> None:
        """Send the next turn of a conversation to a replica, if there is one and it fits into the context."""
        if conversation.done == len(conversation.turns):
            return
        message, answer, _ = conversation.turns[conversation.done]
        if conversation.tokens + message + answer > CONTEXT:
            return
        policy, ticket = self.routing.choice(self.policies), conversation.ticket()
        start = time.thread_time()
        name = policy.choose(ticket, self.slots)
        self.deciding += time.thread_time() - start
        self.decisions += 1
        assert name is not None
        if self.kind == "random":
            policy.release(ticket)
            name = self.routing.choice([*self.replicas])
        if conversation.done and now > self.warm:
            self.later += 1
            self.returned += name == conversation.replica
        conversation.replica = name
        replica = self.replicas[name]
        replica.waiting.append(Request(conversation, policy, ticket, now, conversation.tokens + message, answer))
        if replica.prompt is None:
            self.advance(now, replica)
            self.plan(now, replica)

    # ---- a replica

    def advance(self, now: float, replica: Replica) -> None:
        """Give the running requests their tokens until `now`, and end those that are complete."""
        if replica.pace:
            replica.clock += (now - replica.since) / replica.pace
        replica.since = now
        while replica.running and replica.running[0][0] <= replica.clock + 1e-6:
            self.end(now, replica, heapq.heappop(replica.running)[2])

    def plan(self, now: float, replica: Replica) -> None:
        """Compute the next prompt, or decode until a request ends."""
        replica.plan += 1
        plan, rows = replica.plan, len(replica.running)
        if replica.waiting and rows < SLOTS:
            request = replica.prompt = replica.waiting.popleft()
            reused = replica.cached.get(request.conversation.number, 0) or (SYSTEM_TOKENS if replica.cached else 0)
            if request.conversation.number in replica.cached:
                replica.cached.move_to_end(request.conversation.number)
            if now > self.warm:
                self.prompt += request.prompt
                self.reused += reused
            replica.pace = CHUNK_MS / 1000
            self.at(now + prompt_seconds(reused, request.prompt), lambda end: self.prompt_ended(end, replica))
        elif rows:
            replica.pace = decode_seconds(rows)
            left = max(replica.running[0][0] - replica.clock, 0.0)
            self.at(now + left * replica.pace, lambda end: self.decoded(end, replica, plan))
        else:
            replica.pace = 0.0

    def prompt_ended(self, now: float, replica: Replica) -> None:
        """Give a request its first token."""
        request, replica.prompt = replica.prompt, None
        assert request is not None
        if now > self.warm:
            self.first.append(now - request.arrived)
        self.advance(now, replica)
        request.arrived = now
        heapq.heappush(replica.running, (replica.clock + request.answer - 1, next(self.numbers), request))
        self.advance(now, replica)
        self.plan(now, replica)

    def decoded(self, now: float, replica: Replica, plan: int) -> None:
        """Continue after the end of a request, unless a prompt has interrupted this plan."""
        if plan == replica.plan:
            self.advance(now, replica)
            self.plan(now, replica)

    def end(self, now: float, replica: Replica, request: Request) -> None:
        """End a request, and schedule the next turn."""
        conversation = request.conversation
        if self.kind != "random":
            request.policy.release(request.ticket)
        conversation.tokens = request.prompt + request.answer
        replica.store(conversation, self.cache)
        if now > self.warm:
            replica.tokens += request.answer
            self.gaps.append((now - request.arrived) / max(request.answer - 1, 1))
        pause = conversation.turns[conversation.done][2]
        conversation.done += 1
        self.at(now + pause, lambda when: self.turn(when, conversation))


def quantile(values: list[float], share: float) -> float:
    """Return a quantile in ms."""
    return round(1000 * sorted(values)[int(len(values) * share)], 1) if values else math.nan


def main() -> None:
    """Run the simulations of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rate", type=float, default=1.5, help="requests a second, for each replica")
    parser.add_argument("--gateways", type=int, nargs="+", default=[1])
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument("--seconds", type=float, default=900.0, help="simulated time; its first half is not counted")
    parser.add_argument("--cache", type=int, default=CACHE_TOKENS, help="tokens that a replica can cache")
    args = parser.parse_args()
    for replicas, gateways, kind in itertools.product(args.replicas, args.gateways, args.policies):
        simulation = Simulation(replicas, args.rate * replicas, kind, gateways, args.seconds, args.cache)
        print(json.dumps(simulation.run()), flush=True)


if __name__ == "__main__":
    main()
