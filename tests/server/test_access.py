"""Access: API keys, hosts, web pages of other sites, and paths."""

import pytest
from servers import ANSWER, GREEDY, Running

from tridecode import Engine


@pytest.fixture(scope="module")
def engine():
    with Engine.load(device="cpu", slots=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def running(engine):
    with Running(engine) as running:
        yield running


# ---- keys

RIGHT, WRONG = "s3cret", "other"
KEYS = {
    "bearer": ({"Authorization": f"Bearer {RIGHT}"}, 200),
    "lower_case": ({"authorization": f"bearer {RIGHT}"}, 200),
    "x_api_key": ({"x-api-key": RIGHT}, 200),
    "api_key": ({"api-key": RIGHT}, 200),
    "right_bearer_wrong_x_api_key": ({"Authorization": f"Bearer {RIGHT}", "x-api-key": WRONG}, 200),
    "wrong_bearer_right_x_api_key": ({"Authorization": f"Bearer {WRONG}", "x-api-key": RIGHT}, 200),
    "wrong_x_api_key_right_api_key": ({"x-api-key": WRONG, "api-key": RIGHT}, 200),
    "two_bearers": ([("Authorization", f"Bearer {RIGHT}"), ("Authorization", f"Bearer {WRONG}")], 200),
    "basic": ({"Authorization": f"Basic {RIGHT}"}, 401),
    "no_scheme": ({"Authorization": RIGHT}, 401),
    "all_wrong": ({"Authorization": f"Bearer {WRONG}", "x-api-key": WRONG, "api-key": ""}, 401),
    "none": ({}, 401),
}


@pytest.fixture(scope="module")
def locked(engine):
    with Running(engine, api_keys=(RIGHT,)) as locked:
        yield locked


@pytest.mark.parametrize("headers, status", KEYS.values(), ids=KEYS)
def test_one_right_key_is_enough(locked, headers, status):
    assert locked.get("/v1/models", headers=headers).status_code == status


# ---- hosts and origins


def request(running: Running, host: str | None = None, origin: str | None = None, path: str = "/v1/chat/completions"):
    headers = {name: value for name, value in (("Host", host), ("Origin", origin)) if value is not None}
    return running.post(path, GREEDY, headers=headers)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST", "localhost.", "[::1]:{port}", "10.0.0.7", "a.localhost"],
)
def test_own_hosts_are_accepted(running, host):
    host = host.format(port=running.port)
    for origin in (None, f"http://{host}"):
        assert request(running, host, origin).json()["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "localhost.evil.example", "127.0.0.1.nip.io"])
def test_other_hosts_are_refused_without_a_key(running, locked, host):
    host = host.format(port=running.port)
    for origin in (None, f"http://{host}"):
        for path in ("/v1/chat/completions", "/v1/messages", "/tokenize"):
            got = request(running, host, origin, path)
            assert got.status_code == 403 and "--allow-host" in got.json()["error"]["message"]
    assert running.get("/v1/models", headers={"Host": host}).status_code == 403
    assert running.get("/health", headers={"Host": host}).status_code == 200
    assert locked.get("/v1/models", headers={"Host": host, "api-key": RIGHT}).status_code == 200


@pytest.mark.parametrize("host", ["", "a b", "user@localhost", "[::1", "localhost:80:80"])
def test_invalid_hosts_are_refused(running, host):
    assert running.get("/v1/models", headers={"Host": host}).status_code in (400, 403)


def test_allowed_hosts_are_accepted(engine):
    with Running(engine, allow_hosts=("Chat.Example",)) as running:
        assert request(running, "chat.example").status_code == 200
        assert request(running, "chat.example:8000", "https://chat.example:8000").status_code == 200
        assert request(running, "other.example").status_code == 403
        assert request(running, "chat.example", "https://other.example").status_code == 403
    with Running(engine, allow_hosts=("*",)) as running:
        assert request(running, "any.example", "http://any.example").status_code == 200
        assert request(running, "any.example", "http://other.example").status_code == 403


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://localhost"])
def test_pages_of_other_sites_are_refused_without_a_key(running, origin):
    got = request(running, origin=origin)
    assert (got.status_code, got.json()["error"]["code"]) == (403, "origin_not_allowed")


def test_pages_of_listed_origins_are_accepted(engine):
    for cors in (("https://chat.example",), ("*",)):
        with Running(engine, cors=cors) as running:
            got = request(running, origin="https://chat.example")
            assert got.json()["choices"][0]["message"]["content"] == ANSWER
            assert got.headers["access-control-allow-origin"] in cors


def test_preflight_of_private_network_is_answered_for_listed_origins(engine):
    with Running(engine, cors=("https://chat.example",)) as running:
        for origin, status in (("https://chat.example", 200), ("https://evil.example", 400)):
            headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            headers |= {"Access-Control-Request-Private-Network": "true"}
            got = running.client()._client.options(f"{running.url}/v1/chat/completions", headers=headers)
            assert got.status_code == status
            assert ("access-control-allow-origin" in got.headers) == (status == 200)
            if status == 200:
                assert got.headers["access-control-allow-private-network"] == "true"


def test_pages_can_read_ids_and_retry_times(engine):
    with Running(engine, cors=("https://chat.example",)) as running:
        for path, status in (("/v1/chat/completions", 200), ("/nothing", 404)):
            got = request(running, origin="https://chat.example", path=path)
            exposed = got.headers["access-control-expose-headers"].lower().split(", ")
            assert got.status_code == status and {"x-request-id", "request-id", "retry-after"} <= set(exposed)


# ---- paths


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/", "//v1/chat/completions", "/v1//chat/completions", "/v1/chat/completions//"]
)
def test_additional_slashes_are_ignored(running, path):
    got = running.post(path, GREEDY)
    assert got.status_code == 200 and got.json()["choices"][0]["message"]["content"] == ANSWER


def test_additional_slashes_do_not_open_paths(locked):
    for path in ("/v1/models/", "//v1/models", "/health/x", "/metrics/"):
        assert locked.get(path).status_code == 401
    for path in ("/health/", "/v1/", "//"):
        assert locked.get(path).status_code == 200
    assert locked.get("/v1/models/bundled/", headers={"api-key": RIGHT}).json()["id"] == "bundled"
