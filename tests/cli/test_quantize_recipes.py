"""``nestq quantize --recipe``: each recipe, and options that it does not have."""

from pathlib import Path

import pytest

from nestq import cli
from nestq.checkpoint import read_config


@pytest.mark.parametrize("recipe", ["quantspec_w4w16", "qspec_w4"])
def test_a_recipe_is_applied(dense: str, recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["quantize", dense, "--out", str(out), "--calibration", "none"]
    assert cli.main([*arguments, "--recipe", recipe, "--group-size", "32"]) == 0
    config = read_config(out)
    assert config.recipe is not None
    assert (config.recipe["name"], config.group_size) == (recipe, 32)
    assert config.kv == ("quantspec" if recipe == "quantspec_w4w16" else "16/16")
    assert cli.main(["inspect", str(out)]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recipe", "qspec_w4", "--overlap", "8"], "--overlap does not apply to --recipe qspec"),
        (["--recipe", "w4a8", "--tuning-steps", "5"], "--tuning-steps does not apply"),
        (["--recipe", "quantspec_w4w16", "--rotation", "hadamard"], "rotation must be 'none'"),
    ],
)
def test_options_of_another_recipe(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["quantize", "nowhere", "--out", "nowhere", *options]) == cli.USAGE_ERROR
    assert message in capsys.readouterr().err


def test_a_recipe_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["quantize", "nowhere", "--out", "nowhere", "--recipe", "w3a3"])
    assert "quantspec_w4w16" in capsys.readouterr().err
