"""What is not supported is refused by name, before anything is computed."""

import copy
from typing import Any

import pytest
import small_models
import torch
from speculative_runs import nested_model, padded_prompts, run
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    MambaConfig,
    MambaForCausalLM,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
    TextStreamer,
)

from nestq.kv_cache import NestedKVCache, cache_keyword
from nestq.speculative import decode, speculative_generate
from nestq.speculative.prompts import check_inputs
from nestq.speculative.requests import check_rotary


def refuses(message: str, model: Any, tokens: Any, **options: Any) -> None:
    """Both ways in refuse, and the model has not run."""
    calls: list[Any] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match=message):
        speculative_generate(model, tokens, **{"max_new_tokens": 4, **options})
    with pytest.raises(ValueError, match=message):
        model.generate(tokens, custom_generate=decode, **{"max_new_tokens": 4, **options})
    handle.remove()
    assert not calls


@pytest.mark.parametrize("gamma", [-1, 17, 2.0, 1.5, "4", "automatic", "", True, None])
def test_gamma(gamma: Any) -> None:
    model = nested_model()
    refuses("gamma must be an int from 0 to 16", model, small_models.tokens(model), gamma=gamma)


@pytest.mark.parametrize("value", [2, -0.1, 1.01, float("nan"), "0.4", True, [0.4]])
def test_draft_stops(value: Any) -> None:
    model = nested_model()
    message = "draft_stop must be a probability from 0 to 1, or None, got"
    refuses(message, model, small_models.tokens(model), draft_stop=value)


@pytest.mark.parametrize("value", [-1, 17, 2.0, "auto", True, None])
def test_numbers_of_tokens_to_look_up(value: Any) -> None:
    model = nested_model()
    message = "prompt_lookup must be an int from 0 to 16, got"
    refuses(message, model, small_models.tokens(model), prompt_lookup=value)


def test_draft_stops_with_what_they_exclude() -> None:
    model = nested_model()
    tokens = small_models.tokens(model)
    sampled: dict[str, Any] = {"draft_stop": 0.5, "do_sample": True}
    refuses("draft_stop=0.5 with gamma='auto' is not", model, tokens, gamma="auto", **sampled)
    refuses("draft_stop=0.5 with prompt_lookup=3 is not", model, tokens, prompt_lookup=3, **sampled)
    refuses("cuda_graph=True is not possible", model, tokens, draft_stop=0.5, cuda_graph=True)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, "4", True, [3, -1], [3, None]])
def test_seeds(seed: Any) -> None:
    model = nested_model()
    tokens = small_models.tokens(model)
    for do_sample in (True, False):
        refuses("seed must be an int from 0 to", model, tokens, seed=seed, do_sample=do_sample)


def test_seeds_and_rows() -> None:
    model = nested_model()
    tokens = small_models.tokens(model)  # two rows
    for seed in ([], [1], [1, 2, 3]):
        refuses("one for each of 2 rows, got", model, tokens, seed=seed, do_sample=True)
    message = "one for each of 6 rows, got 2"
    refuses(message, model, tokens, seed=[1, 2], do_sample=True, num_return_sequences=3)


def test_generators() -> None:
    model = nested_model()
    tokens = small_models.tokens(model)
    refuses("generator must be a torch.Generator, got int", model, tokens, generator=3)
    both: dict[str, Any] = {"generator": torch.Generator(), "seed": 3}
    refuses("generator must be left out where seed is given", model, tokens, **both)


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_numbers_of_returned_sequences(count: Any) -> None:
    model = nested_model()
    message = "num_return_sequences must be an int >= 1"
    with pytest.raises(ValueError, match=message):
        run(model, small_models.tokens(model), 2, num_return_sequences=count, do_sample=True)


@pytest.mark.parametrize("kv", ["kv2/kv8", "recent(0)", "", 8])
def test_kv(kv: Any) -> None:
    model = nested_model()
    refuses("the KV policy must be", model, small_models.tokens(model), kv=kv)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 3}, "num_beams=3 is not supported: it asks for beam search"),
        ({"num_beams": 3, "do_sample": True}, "num_beams=3 is not supported"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5 is not supported"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6 is not supported"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3 is not supported"),
        ({"output_attentions": True}, "output_attentions=True is not supported"),
        ({"output_hidden_states": True}, "output_hidden_states=True is not supported"),
        ({"use_cache": False}, "use_cache=False is not supported"),
        ({"cache_implementation": "static"}, "cache_implementation='static' is not supported"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_generation_options(options: dict[str, Any], message: str) -> None:
    model = nested_model()
    options["return_dict_in_generate"] = True
    refuses(message, model, small_models.tokens(model), **options)
    config = GenerationConfig(max_new_tokens=4, **options)
    with pytest.raises(ValueError, match=message):
        speculative_generate(model, small_models.tokens(model), generation_config=config)


@pytest.mark.parametrize("options", [{"num_return_sequences": 2}, {"token_healing": True}])
def test_options_that_transformers_refuses_itself(options: dict[str, Any]) -> None:
    model = nested_model()
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.* is not supported"):
        run(model, small_models.tokens(model), gamma=2, **options)


@pytest.mark.parametrize(
    "name",
    [
        "assistant_model",
        "custom_generate",
        "negative_prompt_ids",
        "negative_prompt_attention_mask",
        "synced_gpus",
    ],
)
def test_keywords(name: str) -> None:
    model = nested_model()
    with pytest.raises(ValueError, match=f"{name} is not supported"):
        run(model, small_models.tokens(model), gamma=2, **{name: torch.ones(2, 3)})


def test_a_model_whose_defaults_ask_for_sampling() -> None:
    model = nested_model()
    tokens = small_models.tokens(model)
    expected = speculative_generate(model, tokens, max_new_tokens=6)
    before = model.generation_config
    model.generation_config = copy.deepcopy(before)
    model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.9)
    try:
        sampled = speculative_generate(model, tokens, max_new_tokens=6, seed=1)
        assert not torch.equal(sampled, expected)
        by_name = speculative_generate(
            model, tokens, max_new_tokens=6, seed=1, do_sample=True, temperature=0.6, top_p=0.9
        )
        assert torch.equal(sampled, by_name)
        greedy = speculative_generate(model, tokens, max_new_tokens=6, do_sample=False)
        assert torch.equal(greedy, expected)
    finally:
        model.generation_config = before


def test_models_that_are_not_nested_decoders() -> None:
    dense = small_models.build("llama-gqa")
    tokens = small_models.tokens(dense)
    refuses("model must have nested weights, and LlamaForCausalLM has none", dense, tokens)
    encoder = T5ForConditionalGeneration(
        T5Config(vocab_size=97, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    )
    encoder.generation_config.decoder_start_token_id = 0
    refuses("got the encoder-decoder T5ForConditionalGeneration", encoder, tokens)
    mamba = MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1))
    refuses("got the recurrent MambaForCausalLM", mamba, tokens)
    with pytest.raises(ValueError, match="model must be a transformers causal language model"):
        speculative_generate(torch.nn.Linear(2, 2), tokens)


def without_refinement(model: PreTrainedModel) -> PreTrainedModel:
    model = copy.deepcopy(model)
    model.lm_head.weight.refinement = None
    return model


def test_a_model_with_the_base_plane_alone() -> None:
    model = without_refinement(nested_model())
    message = r"model must hold both planes, and lm_head\.weight has the base plane alone"
    refuses(message, model, small_models.tokens(model))


def test_a_model_in_training_mode() -> None:
    model = copy.deepcopy(nested_model()).train()
    refuses(r"call model\.eval\(\) first", model, small_models.tokens(model))
    model.eval().model.layers[1].mlp.train()
    refuses(r"model\.layers\.1\.mlp is in training mode", model, small_models.tokens(model))


@pytest.mark.parametrize(
    "mask",
    [[[1, 1, 1, 0], [1, 1, 1, 1]], [[0, 1, 0, 1], [1, 1, 1, 1]], [[0, 0, 0, 0], [1, 1, 1, 1]]],
    ids=["right padding", "a hole", "an empty row"],
)
def test_masks_that_are_not_left_padding(mask: list[list[int]]) -> None:
    model = nested_model()
    tokens = small_models.tokens(model, 2, 4)
    refuses("0 on left padding", model, tokens, attention_mask=torch.tensor(mask))


def test_positions_of_the_user() -> None:
    model = nested_model()
    tokens, mask = padded_prompts(model, [0, 2], 4)
    positions = torch.tensor([[5, 6, 7, 8], [0, 0, 0, 1]])
    refuses("position_ids must count", model, tokens, attention_mask=mask, position_ids=positions)


def test_inputs_of_other_kinds() -> None:
    given = {"token_type_ids": torch.ones(2, 4), "use_cache": True, "attention_mask": None}
    with pytest.raises(ValueError, match="token_type_ids is not supported"):
        check_inputs(nested_model(), given)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (
            torch.ones(4, dtype=torch.int64),
            r"input_ids must be .* got torch\.int64 of shape \(4,\)",
        ),
        (torch.ones(1, 1, 4, dtype=torch.int64), r"input_ids must be .* of shape \(1, 1, 4\)"),
        (torch.ones(1, 4), r"input_ids must be an integer tensor .* got torch\.float32"),
        (torch.ones(1, 4, dtype=torch.bool), r"input_ids must be an integer .* got torch\.bool"),
        ([[1, 2]], r"input_ids must be an integer tensor .* got \[\[1, 2\]\]"),
        (torch.ones(1, 0, dtype=torch.int64), "input_ids must hold at least one token a row"),
        (torch.ones(0, 4, dtype=torch.int64), "input_ids must hold at least one token a row"),
        (torch.tensor([[5, 97]]), "input_ids must be from 0 to 96 .* got 5 to 97"),
        (torch.tensor([[-1, 5]]), "input_ids must be from 0 to 96 .* got -1 to 5"),
    ],
)
def test_prompts_that_are_no_token_ids(ids: Any, message: str) -> None:
    model = nested_model()
    with pytest.raises(ValueError, match=message):
        speculative_generate(model, ids, max_new_tokens=4)
    with pytest.raises(ValueError, match=message):
        speculative_generate(model, input_ids=ids, max_new_tokens=4)


def test_prompts_of_narrow_integers() -> None:
    model = nested_model()
    tokens = small_models.tokens(model)
    expected = speculative_generate(model, tokens, max_new_tokens=4)
    narrow = speculative_generate(model, tokens.int(), max_new_tokens=4)
    assert torch.equal(narrow, expected)


@pytest.mark.parametrize("shape", [(1, 4), (2, 3), (2, 5), (4,), (2, 1, 4)])
def test_masks_of_another_shape(shape: tuple[int, ...]) -> None:
    model = nested_model()
    tokens = small_models.tokens(model, 2, 4)
    mask = torch.ones(shape, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"attention_mask must have the shape of .* \(2, 4\), got"):
        speculative_generate(model, tokens, attention_mask=mask, max_new_tokens=4)


@pytest.mark.parametrize("chunk", [0, -1, "x", 2.0, True])
def test_prefill_chunks(chunk: Any) -> None:
    model = nested_model()
    tokens = small_models.tokens(model)
    refuses("prefill_chunk_size must be an int >= 1", model, tokens, prefill_chunk_size=chunk)


@pytest.mark.parametrize("name", ["stopping_criteria", "logits_processor"])
def test_criteria_and_processors_come_in_lists(name: str) -> None:
    model = nested_model()
    with pytest.raises(ValueError, match=f"^{name} must be a list, got MaxLengthCriteria"):
        run(model, small_models.tokens(model), gamma=2, **{name: MaxLengthCriteria(40)})


@pytest.mark.parametrize("strings", [[], "", ["a", ""], [5], 5])
def test_stop_strings_that_are_none(strings: Any) -> None:
    model = nested_model()
    with pytest.raises(ValueError, match=r"^stop_strings must be a string or a list of strings"):
        run(model, small_models.tokens(model), gamma=2, stop_strings=strings)


def test_a_streamer_that_is_none() -> None:
    model = nested_model()
    with pytest.raises(ValueError, match=r"^streamer must have put and end, got str"):
        run(model, small_models.tokens(model), gamma=99, streamer="stdout")


def test_a_soft_cap_on_attention() -> None:
    model = nested_model("gemma2")
    message = r"Gemma2ForCausalLM has attn_logit_softcapping=50\.0"
    refuses(message, model, small_models.tokens(model))


def test_caches() -> None:
    model = nested_model()
    tokens = small_models.tokens(model, 2, 4)

    def given(cache: Any, **options: Any) -> dict[str, Any]:
        return {"max_new_tokens": 6, "gamma": 3, cache_keyword(model): cache, **options}

    def cache(length: int = 14, batch_size: int = 2) -> NestedKVCache:
        return NestedKVCache(model.config, length, batch_size)

    refuses("cache must be a NestedKVCache", model, tokens, **given(DynamicCache()))
    refuses("max_length of at least 14", model, tokens, **given(cache(13)))
    refuses("batch_size=2", model, tokens, **given(cache(batch_size=3)))
    refuses("kv must be left out", model, tokens, **given(cache(), kv="kv4/kv8"))
    used = cache()
    speculative_generate(model, tokens, **given(used))
    refuses(r"call cache\.reset\(\)", model, tokens, **given(used))


def test_a_batch_without_a_pad_token() -> None:
    model = nested_model()
    tokens = small_models.tokens(model, 2, 4)
    before = model.generation_config.pad_token_id
    model.generation_config.pad_token_id = None
    try:
        assert speculative_generate(model, tokens, max_new_tokens=3).shape == (2, 7)
        refuses("pad_token_id must be given", model, tokens, max_time=100.0)
    finally:
        model.generation_config.pad_token_id = before


def test_more_tokens_than_the_context_has() -> None:
    model = nested_model()  # with a context of 512
    tokens, mask = padded_prompts(model, [3, 5], 9)
    options = {"attention_mask": mask}
    message = r"may be 513 together, .* is 512; lower max_new_tokens"
    refuses(message, model, tokens, max_new_tokens=513 - 6, **options)
    ends = StoppingCriteriaList([lambda ids, _: torch.ones(len(ids), dtype=torch.bool)])
    options |= {"max_new_tokens": 512 - 6, "stopping_criteria": ends}
    assert speculative_generate(model, tokens, **options).shape == (2, 10)


@pytest.mark.parametrize(
    ("rope", "shortest", "longest", "refused"),
    [
        ({"rope_type": "default"}, 4, 200, False),
        ({"rope_type": "linear", "factor": 2.0}, 4, 200, False),
        ({"rope_type": "dynamic", "factor": 2.0}, 4, 64, False),
        ({"rope_type": "dynamic", "factor": 2.0}, 4, 65, True),
        ({"rope_type": "dynamic", "factor": 2.0}, 100, 200, True),
        ({"rope_type": "longrope", "original_max_position_embeddings": 32}, 4, 32, False),
        ({"rope_type": "longrope", "original_max_position_embeddings": 32}, 32, 33, True),
        ({"rope_type": "longrope", "original_max_position_embeddings": 32}, 33, 60, False),
    ],
)
def test_rotary_embeddings_that_change_with_the_length(
    rope: dict[str, Any], shortest: int, longest: int, refused: bool
) -> None:
    config = LlamaConfig(max_position_embeddings=64)
    for parameters in (rope, {"full_attention": rope, "sliding_attention": {}}):
        config.rope_parameters = parameters
        if refused:
            with pytest.raises(ValueError, match="max_length is too large"):
                check_rotary(config, shortest, longest)
        else:
            check_rotary(config, shortest, longest)


def test_an_error_ends_the_stream() -> None:
    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            ends.append(stream_end)

    ends: list[bool] = []
    model = nested_model()
    streamer = Streamer(tokenizer=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gamma"):
        speculative_generate(model, small_models.tokens(model), gamma=99, streamer=streamer)
    assert ends == [True]
