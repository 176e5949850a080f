import pytest
import small_models
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from nestq.architectures import UnsupportedArchitectureError, describe

ALL_FAMILIES = [*small_models.FAMILIES, "gemma2"]


@pytest.mark.parametrize("size", ["small", "odd"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_finds_the_parts_of_every_family(family: str, tied: bool, size: str) -> None:
    model = small_models.build(family, size, tied=tied)

    architecture = describe(model)

    assert architecture.model is model
    assert architecture.embedding is model.get_input_embeddings()
    assert architecture.head is model.get_output_embeddings()
    assert architecture.layers is model.model.layers
    assert architecture.final_norm is model.model.norm
    assert architecture.tied == tied
    assert architecture.hidden_size == model.config.hidden_size
    assert architecture.num_heads == model.config.num_attention_heads
    assert architecture.num_kv_heads == model.config.num_key_value_heads
    assert architecture.head_dim == {"small": 16, "odd": 64}[size]


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_names_cover_exactly_the_linears_of_the_decoder_layers(family: str) -> None:
    model = small_models.build(family)
    in_layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }

    architecture = describe(model)

    assert dict(architecture.named_linears()) == in_layers
    for index in range(len(architecture.layers)):
        for name in architecture.linear_names:
            qualified = f"{architecture.layer_name(index)}.{name}"
            assert architecture.linear(index, name) is in_layers[qualified]


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_groups_run_in_order_and_read_one_tensor_each(family: str) -> None:
    model = small_models.build(family)
    architecture = describe(model)
    seen: list[tuple[str, torch.Tensor]] = []

    def record(name: str) -> None:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda _, args: seen.append((name, args[0])))

    for name, _ in architecture.named_linears():
        record(name)
    with torch.no_grad():
        model(small_models.tokens(model))

    expected_order = [
        {f"{architecture.layer_name(index)}.{name}" for name in group}
        for index in range(len(architecture.layers))
        for group in architecture.linear_groups
    ]
    inputs = []
    for group in expected_order:
        calls, seen = seen[: len(group)], seen[len(group) :]
        assert {name for name, _ in calls} == group
        assert all(tensor is calls[0][1] for _, tensor in calls)
        inputs.append(calls[0][1])
    assert not seen
    assert len({id(tensor) for tensor in inputs}) == len(inputs)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_value_rows_are_the_rows_that_attention_reads_as_values(family: str) -> None:
    model = small_models.build(family)
    architecture = describe(model)
    linear = architecture.linear(0, architecture.value_linear)
    rows = range(linear.out_features)[architecture.value_rows]
    assert len(rows) == architecture.num_kv_heads * architecture.head_dim
    ids = small_models.tokens(model)

    with torch.no_grad():
        linear.weight[architecture.value_rows] = 0.0
        if linear.bias is not None:
            linear.bias[architecture.value_rows] = 0.0
        cache = model(ids, use_cache=True).past_key_values

    assert cache.layers[0].values.count_nonzero() == 0
    assert (cache.layers[0].keys != 0).all()


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_norms_feed_the_groups_that_the_family_names(family: str) -> None:
    model = small_models.build(family)
    architecture = describe(model)
    outputs: dict[str, torch.Tensor] = {}
    inputs: dict[str, torch.Tensor] = {}
    names = architecture.family
    for norm in (names.attention_norm, names.mlp_norm):
        architecture.norm(0, norm).register_forward_hook(
            lambda _, args, output, norm=norm: outputs.__setitem__(norm, output)
        )
    for linear in architecture.linear_names:
        architecture.linear(0, linear).register_forward_pre_hook(
            lambda _, args, linear=linear: inputs.__setitem__(linear, args[0])
        )

    with torch.no_grad():
        model(small_models.tokens(model))

    assert all(inputs[n] is outputs[names.attention_norm] for n in names.attention_inputs)
    assert all(inputs[n] is outputs[names.mlp_norm] for n in names.mlp_inputs)


def test_tied_follows_the_model() -> None:
    model = small_models.build("llama-gqa", tied=True)
    architecture = describe(model)

    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())

    assert not architecture.tied


def test_takes_a_compiled_model() -> None:
    model = small_models.build("llama-gqa")

    assert describe(torch.compile(model)).model is model  # type: ignore[arg-type]


def test_takes_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small_models.build("phi3", tied=True).config)

    assert describe(model).tied


@pytest.mark.parametrize("family", small_models.FAMILIES)
def test_supported_families_are_rotatable(family: str) -> None:
    architecture = describe(small_models.build(family))

    assert architecture.rotatable
    assert architecture.reason is None


def test_gemma2_says_why_it_is_not_rotatable() -> None:
    architecture = describe(small_models.build("gemma2"))

    assert not architecture.rotatable
    assert "norms after attention" in str(architecture.reason)


def test_refuses_what_is_no_module() -> None:
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got str"):
        describe("llama")  # type: ignore[arg-type]


def test_refuses_an_unknown_model_type() -> None:
    config = AutoConfig.for_model("gpt2", n_embd=32, n_head=2, n_layer=1, vocab_size=50)
    model = AutoModelForCausalLM.from_config(config)

    with pytest.raises(UnsupportedArchitectureError, match=r"'gpt2', known are .*llama") as error:
        describe(model)

    assert 'rotation="none"' in str(error.value)


def test_refuses_llama_names_under_an_unknown_model_type() -> None:
    model = small_models.build("llama-gqa")
    setattr(model.config, "model_type", "lookalike")  # noqa: B010 (a class variable)

    with pytest.raises(UnsupportedArchitectureError, match="'lookalike'"):
        describe(model)


def test_refuses_a_module_without_config() -> None:
    with pytest.raises(UnsupportedArchitectureError, match=r"config.model_type is None"):
        describe(nn.Linear(3, 4))


def test_names_every_missing_module() -> None:
    model = small_models.build("llama-gqa")
    del model.model.layers[1].self_attn.v_proj
    model.model.layers[1].mlp.up_proj = nn.Identity()

    with pytest.raises(UnsupportedArchitectureError) as error:
        describe(model)

    assert "model.layers.1.self_attn.v_proj is missing" in str(error.value)
    assert "model.layers.1.mlp.up_proj is a Identity, expected nn.Linear" in str(error.value)


def test_refuses_a_model_without_head() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="lm_head is missing"):
        describe(small_models.build("llama-gqa").model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 8}, "rows of .*v_proj in model.layers.0 together is 128, .* says 64"),
        ({"num_key_value_heads": 3}, "4 is no multiple of num_key_value_heads 3"),
        ({"hidden_size": 40}, "width of model.embed_tokens is 48, the config says 40"),
    ],
)
def test_refuses_sizes_that_disagree_with_the_config(change: dict[str, int], message: str) -> None:
    model = small_models.build("llama-gqa")
    for name, value in change.items():
        setattr(model.config, name, value)

    with pytest.raises(UnsupportedArchitectureError, match=message):
        describe(model)


def test_names_the_layer_whose_size_is_wrong() -> None:
    model = small_models.build("llama-gqa")
    model.model.layers[1].mlp.down_proj = nn.Linear(100, 50)

    with pytest.raises(
        UnsupportedArchitectureError, match=r"out_features of model.layers.1.mlp.down_proj is 50"
    ):
        describe(model)
