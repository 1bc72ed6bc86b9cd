"""The routing policy, without Ray."""

import json

from tridecode.fleet.peers import Peers
from tridecode.fleet.policy import Policy, Report, Ticket
from tridecode.fleet.prefix import Chain, chain_of, fields_of

TWO = ("a", "b")


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def answer(text: str) -> dict:
    return {"role": "assistant", "content": text}


def ticket(*messages: dict, **fields) -> Ticket:
    return Ticket(chain_of({"messages": list(messages)} | fields))


def send(policy: Policy, ticket: Ticket, replicas=TWO, slots: int = 8, **loads: int) -> str | None:
    """Choose a replica for a request that ends at once, while the replicas have loads."""
    policy.running = dict(loads)
    chosen = policy.choose(ticket, dict.fromkeys(replicas, slots))
    policy.release(ticket)
    return chosen


# ---- chains


def test_a_longer_conversation_extends_the_chain():
    first = chain_of({"messages": [user("Hello")]}).hashes
    later = chain_of({"messages": [user("Hello"), answer("Hi"), user("And now?")]})
    assert later.hashes[: len(first)] == first and len(later.hashes) > len(first)
    assert later.shared == len(first) - 1  # An equal first message with an answer is the same conversation.


def test_tools_and_the_system_message_begin_the_chain():
    plain = chain_of({"messages": [user("Hello")]})
    tools = chain_of({"messages": [user("Hello")], "tools": [{"type": "function", "function": {"name": "f"}}]})
    assert not set(plain.hashes) & set(tools.hashes)
    system = {"role": "system", "content": "Be brief. " * 300}
    one, two = (chain_of({"messages": [system, user(text)]}).hashes for text in ("Why?", "How?"))
    assert len(set(one) & set(two)) >= 3 and one != two


def test_a_chain_does_not_depend_on_the_form_of_the_json():
    parts = [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]
    one = chain_of({"messages": [{"content": parts, "role": "developer"}]})
    assert one == chain_of({"messages": [{"role": "system", "content": "Hello", "id": "1"}]})


def test_texts_share_hashes_up_to_their_first_difference():
    text = "x" * 5000
    one, two = chain_of({"prompt": text + "a"}).hashes, chain_of({"prompt": text + "b" * 8000}).hashes
    assert len(set(one) & set(two)) == 3  # Positions 1,024, 2,048 and 4,096.
    assert one[:3] == two[:3]


def test_a_chain_is_bounded():
    assert len(chain_of({"messages": [user("x" * 100_000)] * 1000}).hashes) < 20
    assert len(chain_of({"messages": [user("x"), answer("y")] * 1000}).hashes) < 40


def test_fields_of_a_long_body_are_cut():
    messages = [user("x" * 100_000) for _ in range(10)]
    fields = fields_of(json.dumps({"model": "m", "messages": messages, "logit_bias": {"1": 2}}).encode())
    assert fields["model"] == "m" and len(fields["messages"]) == 2 and "logit_bias" not in fields
    assert chain_of(fields) == chain_of({"messages": messages})


def test_bodies_that_are_not_chats_have_chains():
    assert chain_of({}) == Chain()
    for body in (
        {"input": "Hello" * 300},
        {"prompt": [1, 2, 3] * 300},
        {"prompt": ["a" * 2000]},
        {"messages": [1, None]},
    ):
        assert chain_of(body).hashes


# ---- choices


def test_a_conversation_stays_on_its_replica():
    policy = Policy()
    for i in range(50):
        messages = [user(f"Question {i}")]
        chosen = send(policy, ticket(*messages))
        for turn in range(5):
            messages += [answer(f"Answer {turn}"), user("More")]
            assert send(policy, ticket(*messages), a=2 if chosen == "a" else 0, b=2 if chosen == "b" else 0) == chosen


def test_a_named_session_stays_although_its_prompt_changes():
    policy = Policy()
    chosen = send(policy, Ticket(chain_of({"prompt": "x" * 2000}), "session"))
    for i in range(10):
        assert send(policy, Ticket(chain_of({"prompt": f"{i}" * 2000}), "session"), a=1, b=1) == chosen


def test_a_conversation_moves_if_its_replica_has_no_free_slot():
    policy = Policy()
    messages = [user("Hello"), answer("Hi"), user("More")]
    chosen = send(policy, ticket(*messages[:1]))
    other = "b" if chosen == "a" else "a"
    assert send(policy, ticket(*messages), slots=4, **{chosen: 4}) == other
    assert policy.moved == 1


def test_a_hot_prefix_spreads():
    policy = Policy()
    system = {"role": "system", "content": "You are helpful. " * 200}
    tickets = [ticket(system, user(f"{i}")) for i in range(40)]
    chosen = [policy.choose(each, dict.fromkeys("abcd", 16)) for each in tickets]
    assert max(map(chosen.count, "abcd")) <= 13 and min(map(chosen.count, "abcd")) >= 7


def test_different_prompts_go_to_the_shortest_queue():
    policy = Policy()
    tickets = [ticket(user(f"Question {i}" * 50)) for i in range(40)]
    chosen = [policy.choose(each, dict.fromkeys("abcd", 16)) for each in tickets]
    assert all(chosen.count(name) == 10 for name in "abcd")
    assert policy.running == dict.fromkeys("abcd", 10)
    for each in tickets:
        policy.release(each)
    assert policy.running == dict.fromkeys("abcd", 0)


def test_a_failed_replica_is_avoided():
    policy = Policy()
    request = ticket(user("Hello"))
    first = send(policy, request)
    request.avoid.add(first)
    assert {first, send(policy, request)} == set(TWO)
    request.avoid.update(TWO)
    assert send(policy, request) is None


def test_a_removed_replica_is_forgotten():
    policy = Policy()
    chosen = send(policy, ticket(user("Hello")))
    policy.remove(chosen)
    messages = user("Hello"), answer("Hi"), user("More")
    left = next(name for name in TWO if name != chosen)
    assert send(policy, ticket(*messages), replicas=(left, "c"), **{left: 1}) == "c"
    assert send(policy, ticket(*messages), replicas=(left, "c"), c=1) == "c"


def test_memory_is_bounded_and_forgets_the_oldest():
    policy = Policy(entries=200)
    kept = [user("Kept")]
    chosen = send(policy, ticket(*kept))
    for i in range(1000):
        send(policy, ticket(user(f"Question {i}")))
        if i % 50 == 0:
            kept += [answer("Answer"), user("More")]
            assert send(policy, ticket(*kept), **{chosen: 1}) == chosen
    assert len(policy) <= 200


def test_the_policy_load_ignores_prefixes():
    policy = Policy(kind="load")
    messages = [user("Hello"), answer("Hi"), user("More")]
    chosen = send(policy, ticket(*messages[:1]))
    assert send(policy, ticket(*messages), **{chosen: 1}) != chosen
    assert len(policy) == 0


def test_round_robin():
    policy = Policy(kind="round_robin")
    assert [send(policy, ticket(user("Hello")), replicas="abc") for _ in range(6)] == [*"bcabca"]


# ---- several gateways


def test_gateways_tell_each_other_loads_and_conversations(tmp_path):
    policies = [Policy(several=True) for _ in range(3)]
    peers = [Peers({"model": policy}, tmp_path / "sockets", f"{i}") for i, policy in enumerate(policies)]
    messages = [user("Hello")]
    chosen = policies[0].choose(ticket(*messages), dict.fromkeys(TWO, 8))
    for each in peers:
        each.send()
    for each in peers:
        each.receive()
    # The others know that this replica is busy, and that it has the conversation.
    assert {policy.choose(ticket(user("Other")), dict.fromkeys(TWO, 8)) for policy in policies} == {*TWO} - {chosen}
    later = ticket(*messages, answer("Hi"), user("More"))
    assert {policy.choose(later, dict.fromkeys(TWO, 8)) for policy in policies} == {chosen}


def test_a_gateway_that_has_ended_is_forgotten(tmp_path):
    policy = Policy(several=True)
    policy.receive("ended", Report({"a": 5}, []), 0.0)
    assert policy.choose(ticket(user("Hello")), dict.fromkeys(TWO, 8)) == "b"
    policy.receive("other", Report({}, []), 2.0)
    assert policy.choose(ticket(user("Other")), dict.fromkeys(TWO, 8)) == "a"
