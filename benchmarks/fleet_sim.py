"""A discrete-event simulation of a fleet, with measured pass times and the policy of tridecode.fleet.

    python -m benchmarks.fleet_sim --replicas 1 8 64 --rate 2

Requests are turns of conversations. Conversations arrive as a Poisson process. Each begins with one of a few system
prompts, whose popularity falls by Zipf's law. Lengths are log-normal with the means below, and the number of turns is
geometric. A replica computes waiting prompts first, then a decode pass for all running requests. Its cache holds the
prefixes of the conversations that it has seen last. Prints one JSON object for each size of the fleet and policy.

Pass times were measured with Qwen3-4B on an H100: ms of a decode pass by rows, and ms to the first token by tokens of
the prompt. Between these points the times are interpolated.
"""

import argparse
import heapq
import itertools
import json
import random
import time
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tridecode.fleet.prefix import Chain, Policy, Ticket

DECODE_MS = ((1, 2.791), (8, 3.136), (32, 3.693), (64, 4.383))
PROMPT_MS = ((1, 2.8), (64, 4.2), (2048, 27.9), (32000, 908.0))
SLOTS = 32
CACHE_TOKENS = 250_000  # K/V positions of a replica.
# Means that are often reported for Azure's trace of conversations of 2023. They were not compared with the trace.
PROMPT_TOKENS, ANSWER_TOKENS = 1155, 211
SYSTEMS, SYSTEM_TOKENS = 20, 600
TURNS = 4.0  # Mean number of turns of a conversation.
THINK_SECONDS = 10.0  # Mean time between an answer and the next turn.


def interpolated(points: tuple[tuple[float, float], ...], x: float) -> float:
    """Return the value at x of a line through the points."""
    at = min(max(bisect_left(points, (x,)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@dataclass
class Conversation:
    """A conversation: its system prompt, and the lengths of its turns."""

    number: int
    system: int
    turns: list[tuple[int, int, float]]  # (new tokens of the prompt, tokens of the answer, seconds before the next)
    done: int = 0  # Turns that have ended.
    tokens: int = SYSTEM_TOKENS  # Tokens of the next prompt without the new ones.
    replica: str | None = None

    def ticket(self) -> Ticket:
        """Return the ticket of the next turn: the hashes of the system prompt and of the ends of the messages."""
        own = [hash((self.number, turn)) & (1 << 64) - 1 for turn in range(self.done + 1)]
        return Ticket(Chain((self.system, *own), 1), id="")


@dataclass
class Request:
    """A turn that a replica computes."""

    conversation: Conversation
    ticket: Ticket
    arrived: float
    prompt: int
    answer: int
    generated: int = 0


@dataclass
class Replica:
    """A replica: its queue, its running requests, and the prefixes in its cache."""

    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    cached: OrderedDict[tuple[str, int], int] = field(default_factory=OrderedDict)  # Prefix -> tokens.
    size: int = 0
    active: bool = False
    answered: int = 0  # Tokens of answers that have ended.
    passes: int = 0
    rows: int = 0  # Rows of these passes.

    def reuse(self, conversation: Conversation) -> int:
        """Return the tokens of the next prompt that the cache holds."""
        best = 0
        for key in (("system", conversation.system), ("own", conversation.number)):
            if key in self.cached:
                self.cached.move_to_end(key)
                best = max(best, self.cached[key])
        return best

    def store(self, conversation: Conversation, tokens: int) -> None:
        """Cache the prefix of a conversation, and drop the least recently used ones."""
        system = ("system", conversation.system)
        for key, size in ((system, SYSTEM_TOKENS), (("own", conversation.number), tokens)):
            self.size += size - self.cached.pop(key, 0)
            self.cached[key] = size
        while self.size > CACHE_TOKENS:
            self.size -= self.cached.popitem(last=False)[1]


class Simulation:
    """One run.

    Args:
        replicas: number of replicas.
        rate: conversations that begin in a second.
        choose: "prefix", "load", "random" or "round_robin".
        seconds: simulated time.
    """

    def __init__(self, replicas: int, rate: float, choose: str, seconds: float, seed: int = 0):
        self.random, self.seconds, self.rate = random.Random(seed), seconds, rate
        self.replicas = {f"r{i}": Replica() for i in range(replicas)}
        self.loads = dict.fromkeys(self.replicas, 0)
        self.names, self.next = list(self.replicas), itertools.cycle(self.replicas)
        self.policy = Policy(prefix=choose == "prefix")
        self.kind = choose
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.order, self.numbers = itertools.count(), itertools.count()
        self.routing = random.Random(seed)  # All policies see the same workload.
        self.first: list[float] = []
        self.prompt = self.reused = self.returned = self.later = self.decisions = 0
        self.deciding = 0.0  # Seconds of this machine.
        self.systems = [1 / (i + 1) for i in range(SYSTEMS)]

    def at(self, when: float, action: Callable[[float], None]) -> None:
        """Run `action` at a time."""
        heapq.heappush(self.events, (when, next(self.order), action))

    def run(self) -> dict:
        """Return the figures of the run."""
        self.at(0.0, self.begin)
        while self.events:
            now, _, action = heapq.heappop(self.events)
            if now > self.seconds:
                break
            action(now)
        replicas = self.replicas.values()
        answered = [replica.answered for replica in replicas]
        times = sorted(self.first) or [0.0]
        return {
            "replicas": len(self.replicas),
            "policy": self.kind,
            "requests": len(self.first),
            "first_token_ms_p50": round(1000 * times[len(times) // 2], 1),
            "first_token_ms_p99": round(1000 * times[int(len(times) * 0.99)], 1),
            "reused": round(self.reused / max(self.prompt, 1), 3),
            "returned": round(self.returned / max(self.later, 1), 3),
            "tokens_per_s": round(sum(answered) / self.seconds),
            "rows_of_a_pass": round(
                sum(each.rows for each in replicas) / max(sum(each.passes for each in replicas), 1), 1
            ),
            "most_tokens_over_mean": round(max(answered) * len(answered) / max(sum(answered), 1), 2),
            "decisions_per_s_simulated": round(self.decisions / self.seconds),
            "decisions_per_s_possible": round(self.decisions / max(self.deciding, 1e-9)),
        }

    def begin(self, now: float) -> None:
        """Begin a conversation, and schedule the beginning of the next one."""
        self.at(now + self.random.expovariate(self.rate), self.begin)
        turns = []
        while not turns or self.random.random() > 1 / TURNS:
            pause = self.random.expovariate(1 / THINK_SECONDS)
            turns.append((self.length(PROMPT_TOKENS - SYSTEM_TOKENS), self.length(ANSWER_TOKENS), pause))
        system = self.random.choices(range(SYSTEMS), self.systems)[0]
        self.turn(now, Conversation(next(self.numbers), system, turns))

    def length(self, mean: float) -> int:
        """Return a log-normal length."""
        return max(int(self.random.lognormvariate(0, 1) * mean / 1.6487), 1)

    def turn(self, now: float, conversation: Conversation) -> None:
        """Send the next turn of a conversation to a replica."""
        ticket, start = conversation.ticket(), time.perf_counter()
        name = self.choose(ticket)
        self.deciding += time.perf_counter() - start
        self.decisions += 1
        if conversation.done:
            self.later += 1
            self.returned += name == conversation.replica
        conversation.replica = name
        new, answer, _ = conversation.turns[conversation.done]
        replica = self.replicas[name]
        replica.waiting.append(Request(conversation, ticket, now, conversation.tokens + new, answer))
        if not replica.active:
            replica.active = True
            self.step(now, replica)

    def choose(self, ticket: Ticket) -> str:
        """Return the replica of a request."""
        if self.kind == "random":
            return self.routing.choice(self.names)
        if self.kind == "round_robin":
            return next(self.next)
        return self.policy.choose(ticket, self.loads, SLOTS) or self.names[0]

    def step(self, now: float, replica: Replica) -> None:
        """Run one pass: the prompt of a waiting request with the running requests, or a decode pass."""
        if replica.waiting and len(replica.running) < SLOTS:
            request = replica.waiting.popleft()
            reused = min(replica.reuse(request.conversation), request.prompt - 1)
            self.prompt += request.prompt
            self.reused += reused
            took = interpolated(PROMPT_MS, request.prompt) - interpolated(PROMPT_MS, max(reused, 1))
            took = (took + interpolated(DECODE_MS, len(replica.running) + 1)) / 1000
            replica.running.append(request)
        elif replica.running:
            took = interpolated(DECODE_MS, len(replica.running)) / 1000
        else:
            replica.active = False
            return
        replica.passes += 1
        replica.rows += len(replica.running)
        self.at(now + took, lambda end: self.ended(end, replica))

    def ended(self, now: float, replica: Replica) -> None:
        """Give each running request a token, end those that are complete, and run the next pass."""
        left = []
        for request in replica.running:
            request.generated += 1
            if request.generated == 1:
                self.first.append(now - request.arrived)
            if request.generated < request.answer:
                left.append(request)
                continue
            conversation = request.conversation
            self.policy.release(request.ticket)
            conversation.tokens = request.prompt + request.answer
            replica.store(conversation, conversation.tokens)
            replica.answered += request.answer
            later = now + conversation.turns[conversation.done][2]
            conversation.done += 1
            if conversation.done < len(conversation.turns):
                self.at(later, lambda when, conversation=conversation: self.turn(when, conversation))
        replica.running = left
        self.step(now, replica)


def main() -> None:
    """Run the simulations of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument(
        "--rate", type=float, default=3.0, help="conversations that begin in a second, for each replica"
    )
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--policies", nargs="+", default=["prefix", "load", "random", "round_robin"])
    args = parser.parse_args()
    for replicas in args.replicas:
        for policy in args.policies:
            simulation = Simulation(replicas, args.rate * replicas, policy, args.seconds)
            print(json.dumps(simulation.run()), flush=True)


if __name__ == "__main__":
    main()
