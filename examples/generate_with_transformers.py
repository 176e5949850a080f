"""Use a nested checkpoint through transformers alone: `from_pretrained` and `generate`.

Makes a small checkpoint on the first run: python examples/generate_with_transformers.py
"""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import nestq  # registers the format with transformers
from nestq.data import calibration_tokens
from nestq.pretrained import load_model

folder = Path("checkpoints/example")
if not folder.exists():
    model, tokenizer = load_model("smollm2-135m")
    nestq.quantize_(
        model,
        nestq.bitnest_w4w8(),
        calibration=calibration_tokens(tokenizer, max_tokens=8192),
        tokenizer=tokenizer,
    )
    nestq.save(model, folder, tokenizer)

model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
prompt = [{"role": "user", "content": "What does a compiler do?"}]
inputs = tokenizer.apply_chat_template(
    prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
# The same tokens as nestq.speculative_generate, without streamers and stop strings.
tokens = model.generate(
    **inputs, custom_generate=nestq.decode, gamma=4, max_new_tokens=48, do_sample=False
)
print(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
