"""Draw results of `nestq eval --json` side by side: perplexity and agreement of each model.

python benchmarks/plot_quality.py RESULT.json [RESULT.json ...] --out quality.png
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def main() -> None:
    """Read results, draw one group of bars a result, write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for offset, path in enumerate(options.results):
        models = {
            model["name"].split(" (")[0]: model
            for model in json.loads(path.read_text())["models"]
            if model["name"] != "16-bit"
        }
        reference = json.loads(path.read_text())["models"][0]
        places = [index + 0.8 * offset / len(options.results) for index in range(len(models))]
        width = 0.75 / len(options.results)
        loss = [100 * (m["perplexity"] / reference["perplexity"] - 1) for m in models.values()]
        left.bar(places, loss, width, label=path.stem)
        right.bar(places, [m["agreement"] for m in models.values()], width, label=path.stem)
        for axes in (left, right):
            axes.set_xticks(range(len(models)), list(models))
    left.set_ylabel("perplexity above 16-bit, %")
    left.axhline(0, color="black", linewidth=0.8)
    right.set_ylabel("same token as 16-bit")
    right.set_ylim(0.7, 1)
    right.legend(loc="upper right")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=130)


if __name__ == "__main__":
    main()
