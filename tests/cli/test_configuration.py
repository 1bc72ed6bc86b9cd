"""Tests of settings: the command line overrides the environment, which overrides the user's file."""

import os
import tomllib
from pathlib import Path

import pytest

from tridecode.cli.configuration import OTHER_VARIABLES, PREFIX, config_path
from tridecode.cli.options import sampling_overrides
from tridecode.cli.parser import make_parser


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Return a function that writes the user's file and sets TRIDECODE_* variables (names in capitals)."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def config(text="", **variables):
        config_path().parent.mkdir(exist_ok=True)
        config_path().write_text(text)
        for name, value in variables.items():
            monkeypatch.setenv(PREFIX + name, value)

    return config


def parsed(*argv):
    return make_parser().parse_args(argv)


def refused(run, *argv) -> str:
    """Run a command with invalid settings and return its error line."""
    code, out, err = run(*argv)
    assert code == 2 and out == "" and err.startswith("tridecode: error: ") and err.count("\n") == 1
    return err.removeprefix("tridecode: error: ").strip()


def test_option_overrides_environment_and_environment_overrides_file(config):
    config('model = "file"\nslots = 2\ntemperature = 0.5\nstats = "off"\n', SLOTS="3", STATS="short")
    args = parsed("chat", "--stats", "full")
    assert (args.model, args.slots, args.temperature, args.stats) == ("file", 3, 0.5, "full")
    assert args.origins == {"model": "config.toml", "slots": "TRIDECODE_SLOTS", "temperature": "config.toml"}
    assert (args.device, args.overflow, args.plain) == ("auto", None, False), (
        "a setting without a source differs from its default"
    )


def test_every_kind_of_value(config):
    config(
        'plain = true\nprefix-sharing = false\nseed = 7\ngraph_sizes = [1, 2, 4]\nstop = ["\\n\\n", "###"]\n'
        "logit_bias = {42 = -1.5, 7 = 2}\nstop_token_ids = [5, 6]\nprompt_ms = 20\nignore_eos = true\n",
        QUIET="on",
    )
    args = parsed("chat")
    assert args.plain is args.quiet is True and args.prefix_sharing is False and args.prompt_ms == 20.0
    assert args.graph_sizes == (1, 2, 4) and args.stop_token_ids == (5, 6)
    given = {"seed": 7, "stop": ["\n\n", "###"], "logit_bias": {42: -1.5, 7: 2.0}, "stop_token_ids": (5, 6)}
    assert sampling_overrides(args) == given | {"ignore_eos": True}
    args = parsed("chat", "--stop", "x", "--logit-bias", "1=1")
    assert args.stop == ["x"] and args.logit_bias == [(1, 1.0)], "the option was appended to the list of the file"


def test_response_format_can_be_a_setting(config):
    config('[generate]\njson_schema = "schema.json"\n', REGEX="a+")
    args = parsed("generate", "--choice", "x")
    assert (args.json_schema, args.regex, args.choice) == ("schema.json", "a+", ["x"])
    config("", KERNELS="on")
    assert parsed("info").kernels is True


def test_table_applies_to_its_command(config):
    config("slots = 2\nmax_queue = 9\n[serve]\nslots = 16\nport = 9000\n[generate]\ntemperature = 0\n")
    assert (parsed("serve").slots, parsed("serve").port, parsed("serve").max_queue) == (16, 9000, 9)
    assert (parsed("chat").slots, parsed("chat").temperature) == (2, None)
    assert (parsed("generate").slots, parsed("generate").temperature) == (2, 0.0)
    assert parsed("generate").max_queue is None, "a batch used max_queue of the file"
    assert (parsed("info").slots, parsed("doctor").slots) == (2, 2)
    config("", PORT="9001", SLOTS="8")
    assert (parsed("serve").port, parsed("serve").slots) == (9001, 8), (
        "the environment did not override a table of the file"
    )


WRONG = {
    "key": ("temprature = 1", "there is no key temprature; did you mean temperature?"),
    "key of a call": ('prompt = "Hi"', "there is no key prompt; "),
    "key of a table": ("[serve]\nprot = 1", "in [serve] there is no key prot; did you mean port?"),
    "table": ("[sevre]\nport = 1", "there is no key sevre; did you mean serve?"),
    "table that is none": ("serve = 1", "serve must be a table, [serve], got 1"),
    "word": ('temperature = "hot"', "temperature: expected a number from 0 to 100, got 'hot'"),
    "text": ("model = 4", "model: expected a text, got 4"),
    "switch": ('plain = "maybe"', 'plain: expected true or false, got "maybe"'),
    "not a switch": ("slots = true", "slots: expected a text or a number, got true"),
    "choice far from all": ('stats = "zzzz"', "stats: expected full, short or off, got 'zzzz'\n"),
    "choice": ('overflow = "drop-oldst"', "drop-oldest or stop, got 'drop-oldst'; did you mean drop-oldest?"),
    "switch that is a date": ("plain = 2026-01-01", 'plain: expected true or false, got "2026-01-01"'),
    "table that is a date": ("serve = 2026-01-01", 'serve must be a table, [serve], got "2026-01-01"'),
    "list of lists": ("graph_sizes = [[1], [2]]", "graph_sizes: expected a text or a number, got [[1], [2]]"),
    "range": ("slots = 65", "slots: expected an integer from 1 to 64, got '65'"),
    "table for a list": ("stop = {a = 1}", 'stop: expected a text or a number, got {"a": 1}'),
    "key in both forms": (
        "max_tokens = 1\nmax-tokens = 2",
        "max_tokens and max-tokens set the same option; remove one of",
    ),
    "not TOML": ("model = ", "not TOML ("),
    "an integer of 5,000 digits": ("seed = " + "9" * 5000, "digits); correct it"),
    "such an integer in a list": ("stop_token_ids = [1, " + "9" * 5000 + "]", "digits); correct it"),
    "a hexadecimal integer of 5,000 digits": ("[serve]\nport = 0x" + "f" * 5000, "not TOML (Exceeds the limit"),
    "not UTF-8": ("model = \udcff", "not UTF-8"),
}


@pytest.mark.parametrize("text, words", WRONG.values(), ids=WRONG)
def test_invalid_file_fails_with_one_line(config, run, text, words):
    config()
    config_path().write_bytes(text.encode("utf-8", "surrogateescape"))
    for command in ("chat", "generate", "serve", "info", "config"):
        message = refused(run, command)
        assert message.startswith(f"{config_path()}: ") and words in f"{message}\n"


def test_invalid_value_of_a_variable_fails_with_one_line(config, run):
    config("", SLOTS="many")
    line = "TRIDECODE_SLOTS: expected an integer from 1 to 64, got 'many'"
    assert refused(run, "chat") == refused(run, "config") == line
    config("", SLOTS="", API_KEY="secret")
    assert parsed("chat").slots == 1, "an empty variable changed the setting"
    assert parsed("chat").api_key_file is None


# Variables of the containers next to a Kubernetes service, or a linked Docker container, called tridecode.
LINKS = {
    "SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "8000", "PORT": "tcp://10.0.0.1:8000", "NAME": "/web/tridecode",
    "PORT_8000_TCP": "tcp://10.0.0.1:8000", "PORT_8000_TCP_ADDR": "10.0.0.1", "API_PORT": "udp://10.0.0.1:9",
}  # fmt: skip


def test_variables_of_service_links_are_ignored_with_one_line(config, run):
    config("", **LINKS, MAX_TOKENS="7")
    assert parsed("serve").port == 8000 and parsed("chat").max_tokens == 7
    code, out, err = run("config")
    names = "TRIDECODE_API_PORT, TRIDECODE_NAME, TRIDECODE_PORT and 4 more"
    assert (code, err) == (
        0,
        f"ignored the variables {names}, which set no option; tridecode config lists the settings\n",
    )
    assert "max_tokens = 7" in out


def test_misspelled_variable_is_ignored_with_a_suggestion(config, run):
    config("", MODLE="x")
    line = "ignored the variables TRIDECODE_MODLE, which set no option; did you mean TRIDECODE_MODEL?\n"
    assert run("config")[2] == line


@pytest.mark.parametrize("name, value", [("PORT", "http://a"), ("PORT", "tcp"), ("URL", "tcp://10.0.0.1:8000")])
def test_variable_that_is_not_a_service_link_must_be_valid(config, run, name, value):
    config("", **{name: value})
    assert refused(run, "config").startswith(f"TRIDECODE_{name}: expected ")


def test_out_of_range_error_names_the_source_of_the_value(config, run):
    config("temperature = -1\n")
    message = refused(run, "generate", "--prompt", "Hello")
    assert message == f"{config_path()}: temperature: expected a number from 0 to 100, got '-1'"
    config("max_seq_len = 100000\n")
    code, _, message = run("generate", "--prompt", "Hello")
    assert (
        code == 1
        and "--max-seq-len must be" in message
        and message.endswith(" (--max-seq-len is set by config.toml)\n")
    )


def test_byte_order_mark_is_accepted(config):
    config("\ufeffslots = 2\r\n[generate]\r\nslots = 3\r\n")
    assert (parsed("chat").slots, parsed("generate").slots) == (2, 3)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_configuration_path_must_be_a_regular_file(config, run, make):
    config()
    config_path().unlink()
    make(config_path())
    for command in ("chat", "config"):
        message = refused(run, command)
        assert message == f"{config_path()}: not a file; give a regular file with settings"


def test_other_commands_and_help_do_not_read_the_file(config, capsys):
    config("nonsense")
    assert parsed("sessions").command == "sessions" and parsed("bench", "decode").what == "decode"
    with pytest.raises(SystemExit) as end:
        parsed("chat", "--help")
    assert end.value.code == 0 and "--model" in capsys.readouterr().out


def test_config_shows_values_and_their_sources(config, run):
    text = 'model = "Qwen/Qwen3-4B"\nlogit_bias = {42 = -1.5}\n[serve]\nslots = 16\nport = 9000\n'
    text = f'speculate_ngram = "8:2"\nstop = ["é", "a\\u007fb"]\n{text}'
    config(text, STATS="short")
    code, out, _ = run("config")
    assert code == 0
    shown = [" ".join(line.split()) for line in out.splitlines()]
    assert shown[0] == f"# {config_path()}"
    assert 'model = "Qwen/Qwen3-4B" # config.toml' in shown and 'stats = "short" # TRIDECODE_STATS' in shown
    assert "# temperature =" in shown and '# device = "auto"' in shown and '# think = "on"' in shown
    assert shown.index("slots = 16 # config.toml") > shown.index("[serve]") and "# slots = 1" in shown
    assert tomllib.loads(out) == tomllib.loads(text) | {"stats": "short"}, "the output is not a valid settings file"
    config_path().unlink()
    assert "config.toml, which does not exist yet" in run("config")[1]


def test_engine_settings_are_ignored_by_chat_with_url(config):
    config('model = "file"\nslots = 4\napi_key_file = "key"\noverflow = "stop"\n')
    args = parsed("chat", "--url", "http://127.0.0.1:1")
    assert {"model", "slots", "overflow", "api_key_file"} <= args.origins.keys()


def test_program_reads_its_file(config, run):
    config('max_tokens = 3\ntemperature = 0\ndevice = "cpu"\n[generate]\nquiet = true\n')
    code, out, err = run("generate", "--prompt", "Hello", "--json")
    assert code == 0 and '"completion_tokens": 3,' in out and err == ""


def test_no_test_reads_the_users_settings():
    assert not config_path().exists() and config_path().parent != Path.home() / ".config" / "tridecode"
    assert [name for name in os.environ if name.startswith(PREFIX) and name not in OTHER_VARIABLES] == []
