"""lm-eval's local-completions with two small tasks. Usage: python lm_eval_client.py URL, in a checkout of tridecode.

It prints lines like python_clients.py.
"""

import json
import os
import sys
import tempfile
from importlib.metadata import version

os.environ["HF_HUB_OFFLINE"] = "1"
import lm_eval  # noqa: E402

PAIRS = [("The answer to 17 + 25 is", " 42"), ("1, 2, 3, 4, 5, 6,", " 7")]
with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
    for text, end in PAIRS:
        print(json.dumps({"text": text, "choices": [end, " zebra soap"], "label": 0, "end": end.strip()}), file=file)
    file.flush()
    common = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": file.name}}, "test_split": "test",
        "doc_to_text": "{{text}}", "target_delimiter": "",
    }  # fmt: skip
    choice = {"task": "choice", "output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "label"}
    writing = {
        "task": "writing", "output_type": "generate_until", "doc_to_target": "end",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8}, "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    model = {"model": "bundled", "base_url": f"{sys.argv[1]}/v1/completions", "tokenizer": "tridecode/bundled"}
    for case, task in ("plain", writing), ("logprobs", choice):
        got = lm_eval.simple_evaluate("local-completions", model, tasks=[common | task], bootstrap_iters=0)
        samples = got["samples"][task["task"]]
        answers = [sample["resps"] for sample in samples]
        if case == "logprobs" and all(float(good[0][0]) > float(bad[0][0]) for good, bad in answers):
            answers = "ranked"
        print(json.dumps(["lm-eval, local-completions", version("lm-eval"), case, str(answers)]))
