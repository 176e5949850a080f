import pytest
import torch
import torch.nn.functional as F

from nestq.reference.pointwise import VECTOR_CHUNK, same_bits_anywhere

FUNCTIONS = [torch.exp, F.silu, F.gelu, torch.sigmoid]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_element_has_the_same_bits_wherever_it_lies(function, dtype: torch.dtype) -> None:
    x = torch.randn(3 * VECTOR_CHUNK + 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = same_bits_anywhere(function, x)

    for count in (1, 7, 8, 15, 63, 64, 65, 1000, VECTOR_CHUNK + 1):
        for start in (0, 1, 13, VECTOR_CHUNK - 3):
            span = slice(start, start + count)
            assert torch.equal(same_bits_anywhere(function, x[span]), whole[span])


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2, 0, 4), (1, 1), (2, 3, 64)])
def test_shape_dtype_and_values_are_those_of_the_function(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    out = same_bits_anywhere(F.gelu, x, approximate="tanh")

    assert out.shape == x.shape
    torch.testing.assert_close(out, F.gelu(x, approximate="tanh"), rtol=1e-14, atol=1e-15)


def test_a_strided_input_is_read_by_its_elements() -> None:
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))

    assert torch.equal(same_bits_anywhere(F.silu, x.T), same_bits_anywhere(F.silu, x).T)


def test_the_input_stays_as_it_is() -> None:
    x = torch.randn(128, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    same_bits_anywhere(F.silu, x, inplace=True)

    assert torch.equal(x, before)


def test_gradients_flow() -> None:
    x = torch.randn(70, generator=torch.Generator().manual_seed(0), requires_grad=True)
    same_bits_anywhere(F.silu, x).sum().backward()
    (expected,) = torch.autograd.grad(F.silu(x).sum(), x)

    torch.testing.assert_close(x.grad, expected)
