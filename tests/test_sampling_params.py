"""SamplingParams: accepted values, and errors with the name of the parameter."""

import pytest

from tridecode import SamplingParams
from tridecode.errors import ParameterError

REFUSED = [
    dict(temperature=-0.1), dict(temperature="hot"), dict(temperature=True), dict(temperature=float("nan")),
    dict(top_p=0), dict(top_p=1.1), dict(min_p=-1), dict(top_k=-1), dict(top_k=1.5), dict(repetition_penalty=0),
    dict(repetition_penalty=1e-50), dict(presence_penalty=3), dict(frequency_penalty=-3), dict(seed="x"),
    dict(seed=2**64), dict(max_tokens=0), dict(logprobs=21), dict(stop=5), dict(stop=[""]), dict(stop=[3]),
    dict(stop_token_ids=7), dict(stop_token_ids=[-1]), dict(stop_token_ids=[True]), dict(logit_bias=[1]),
    dict(logit_bias={-1: 0.0}), dict(logit_bias={1: float("nan")}), dict(logit_bias={1: 1e300}),
    dict(logit_bias={1: 10**400}), dict(logit_bias={1: "2"}),
]  # fmt: skip


@pytest.mark.parametrize("fields", REFUSED, ids=str)
def test_wrong_values_are_rejected(fields):
    (name,) = fields
    with pytest.raises(ParameterError, match=f"^{name}(:| must be) ") as raised:
        SamplingParams(**fields)
    assert raised.value.argument == name and raised.value.code in ("type", "range")


def test_none_is_absent_and_one_stop_string_is_a_list():
    params = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), {})
    assert SamplingParams(stop="ab").stop == ("ab",)


def test_greedy_means_argmax_of_raw_logits():
    assert SamplingParams(temperature=0).greedy
    for more in (dict(logit_bias={1: 1.0}), dict(presence_penalty=0.1), dict(temperature=0.5)):
        assert not SamplingParams(**{"temperature": 0, **more}).greedy
