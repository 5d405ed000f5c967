"""Prints text of a model before and after training: `python sample.py RUN_DIR`."""

import sys
from pathlib import Path


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    model_file = Path(sys.argv[1]) / "best.safetensors"
    print(f"loading {model_file}", flush=True)
    import torch  # noqa: PLC0415 - takes seconds
    from char_gpt import GPT, CharGPT  # noqa: PLC0415 - likewise

    import lanewise  # noqa: PLC0415 - likewise
    from lanewise.errors import LanewiseError  # noqa: PLC0415 - likewise

    torch.set_num_threads(1)  # the model is too small for more
    try:
        task, trained = lanewise.load(model_file)
    except LanewiseError as error:
        raise SystemExit(f"error: {error}") from None
    assert isinstance(task, CharGPT)
    for when, model in (("before", task.build_model().eval()), ("after", trained)):
        assert isinstance(model, GPT)
        torch.manual_seed(0)
        tokens = model.generate(task.text[task.num_train :][: task.config.context], 400)
        print(f"--- {when} training\n{''.join(task.alphabet[token] for token in tokens)}\n", flush=True)


if __name__ == "__main__":
    main()
